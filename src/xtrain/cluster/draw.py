"""A recorded run as pictures.

    timeline_svg    a row for each rank: what it computed, where it waited, and below
                    that, thinner, the messages and collectives it had in flight
    heat_svg        a cell for each link: the darker, the longer its bytes need it

Pieces that are narrower than a quarter of a pixel are drawn together with the next one
of their kind, so a run of a million messages is a small file. Colours differ in
lightness and height as well as in hue, and follow the page's choice of light or dark,
or else the reader's.
"""

import html
import re
from collections.abc import Iterable, Iterator, Sequence

from xtrain.cluster.amounts import in_words
from xtrain.cluster.recorder import COMPUTE, WAIT, RunRecord, RunTransfer

LEFT, RIGHT, TOP = 52, 10, 24
NEAR = 0.25  # pixels
MOST_TITLES = 1500  # pieces with a text for the pointer: more make a large file
ROWS = ((16, 22.0), (64, 9.0), (256, 4.0))  # so many ranks: how high a row is
SHORT = 6.0  # rows below it have no room for what is in flight
KINDS = {
    "compute": "computes", "wait": "waits", "message": "message in flight",
    "collective": "collective in flight",
}  # fmt: skip
LIGHT = (
    "--compute:#1f6fb5;--wait:#e9b48c;--message:#2f7d4f;--collective:#7a3fa0;"
    "--ink:#1c2530;--faint:#5f6b79;--line:#d5cdbf;--heat:#b4470c"
)
DARK = (
    "--compute:#3f8fd8;--wait:#7d4a22;--message:#5fb582;--collective:#b585d8;"
    "--ink:#e4eaf1;--faint:#98a5b4;--line:#3c4a5c;--heat:#f08a4b"
)
STYLE = (
    f".xc{{{LIGHT};font:600 11px system-ui,sans-serif;height:auto}}"
    f"@media (prefers-color-scheme:dark){{.xc{{{DARK}}}}}"
    f"[data-md-color-scheme=default] .xc{{{LIGHT}}}"
    f"[data-md-color-scheme=slate] .xc{{{DARK}}}"
    ".xc .l{fill:var(--ink)}.xc .t{fill:var(--faint);font-weight:400}"
    ".xc .a{stroke:var(--line)}.xc .h{fill:var(--heat)}"
    ".xc .e{fill:none;stroke:var(--line)}"
    + "".join(f".xc .{kind}{{fill:var(--{kind})}}" for kind in KINDS)
)
Piece = tuple[str, float, float, str]  # kind, begin, end, text


def timeline_svg(
    record: RunRecord,
    title: str = "Timeline",
    width: int = 400,
    ranks: Sequence[int] | None = None,
) -> str:
    """What each rank did, from left to right.

    Args:
        title: for readers who do not see it.
        width: of the drawing, in pixels; it shrinks with its page.
        ranks: the rows to draw; None draws all.

    Raises:
        ValueError: a rank that the record does not have.
    """
    shown = range(len(record.seconds)) if ranks is None else ranks
    for rank in shown:
        if not 0 <= rank < len(record.seconds):
            raise ValueError(
                f"timeline_svg: rank {rank} of a record of {len(record.seconds)} ranks"
            )
    high = next((row for most, row in ROWS if len(shown) <= most), 2.0)
    scale = (width - LEFT - RIGHT) / (record.makespan or 1.0)
    keys, key_rows = key(width, {COMPUTE, WAIT, *map(kind_of, record.transfers)})
    top = TOP + 18 * (key_rows - 1)
    flights = in_flight(record, set(shown)) if high >= SHORT else {}
    rows = [
        (joined(spans_of(record, rank), NEAR / scale),
         joined(flights.get(rank, ()), NEAR / scale))
        for rank in shown
    ]  # fmt: skip
    titles = sum(len(piece) for row in rows for piece in row) <= MOST_TITLES
    parts = [*keys, *names_of(shown, top, high)]
    for row, (spans, flying) in enumerate(rows):
        y, tall = top + row * high, high * (0.62 if flights else 0.85)
        for piece in spans:
            low = 0.2 * tall if piece[0] == WAIT else 0.0
            parts.append(box(piece, scale, y + low, tall - 2 * low, titles))
        for piece in flying:
            parts.append(box(piece, scale, y + 0.66 * high, 0.22 * high, titles))
    foot = top + len(shown) * high
    parts += axis(record.makespan, width, foot)
    words = f"{title}: {len(shown)} ranks, {in_words(record.makespan, 's')}"
    return document(width, foot + 22, parts, words)


def box(piece: Piece, scale: float, y: float, high: float, titles: bool) -> str:
    """One piece of a row, with its text and times for the pointer."""
    kind, begin, end, text = piece
    hover = ""
    if titles:
        times = f"{in_words(begin, 's')} to {in_words(end, 's')}"
        text = re.sub(" at .*/", " at ", text)  # of the program's file its name
        hover = f"<title>{html.escape(text)}: {times}</title>"
    x, wide = LEFT + begin * scale, max((end - begin) * scale, NEAR)
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" '
        f'height="{high:.1f}">{hover}</rect>'
    )


def spans_of(record: RunRecord, rank: int) -> Iterator[Piece]:
    for kind, start, end, call, _ in record.spans(rank):
        yield kind, start, end, call or "computes"


def kind_of(transfer: RunTransfer) -> str:
    return "message" if transfer.kind == "message" else "collective"


def in_flight(record: RunRecord, shown: set[int]) -> dict[int, list[Piece]]:
    """Of each rank: messages it sends, collectives it takes part in."""
    found: dict[int, list[Piece]] = {rank: [] for rank in shown}
    for one in record.transfers:
        amount = in_words(one.nbytes, "B")
        text = f"{one.kind} of {amount}"
        if one.kind == "message":
            text += f" to rank {one.ranks[1]}"
        for rank in one.ranks[:1] if one.kind == "message" else one.ranks:
            if rank in shown:
                found[rank].append((kind_of(one), one.start, one.end, text))
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece[1])
    return found


def joined(pieces: Iterable[Piece], near: float) -> list[Piece]:
    """Short pieces with the ones before them of their kind, less than `near` away.

    Pieces of one kind that overlap are joined, too.
    """
    found: list[Piece] = []
    last: dict[str, int] = {}
    for kind, start, end, text in pieces:
        if end <= start:
            continue
        at = last.get(kind)
        if at is not None:
            _, begun, ended, _ = before = found[at]
            short = end - start < near or ended - begun < near
            if start < ended or (short and start - ended < near):
                found[at] = (kind, begun, max(end, ended), also(before[3]))
                continue
        last[kind] = len(found)
        found.append((kind, start, end, text))
    return found


def also(text: str) -> str:
    return text if text.endswith(" and more") else f"{text} and more"


def names_of(shown: Sequence[int], top: float, high: float) -> Iterator[str]:
    """The numbers of the ranks, of as many rows as have room."""
    every = 1
    while every * high < 13:
        every *= 2
    for row in range(0, len(shown), every):
        y = top + row * high + min(high * 0.31, high / 2) + 4
        yield f'<text class="l" x="0" y="{y:.1f}">rank {shown[row]}</text>'


def axis(last: float, width: int, y: float) -> Iterator[str]:
    """The line below the rows, with the first and the last time."""
    right = width - RIGHT
    yield f'<line class="a" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
    for x, anchor, time in ((LEFT, "start", 0.0), (right, "end", last)):
        yield (
            f'<text class="t" x="{x}" y="{y + 14:.1f}" text-anchor="{anchor}">'
            f"{in_words(time, 's')}</text>"
        )


def key(width: int, kinds: set[str]) -> tuple[list[str], int]:
    """What the colours mean, above the rows; how many lines that takes."""
    parts, x, row = [], 0.0, 0
    for kind, name in KINDS.items():
        wide = 30 + 6.2 * len(name)
        if kind not in kinds:
            continue
        if x and x + wide > width:
            x, row = 0.0, row + 1
        parts.append(
            f'<rect class="{kind}" x="{x:.0f}" y="{3 + 18 * row}" width="12" '
            f'height="12"/><text class="t" x="{x + 17:.0f}" y="{13 + 18 * row}">'
            f"{name}</text>"
        )
        x += wide
    return parts, row + 1


def document(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """One SVG that shrinks with its page and grows to 1.3 of its size."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="xc" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="100%" '
        f'style="min-width:0;max-width:{1.3 * width:.0f}px">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        + "".join(parts)
        + "</svg>"
    )
