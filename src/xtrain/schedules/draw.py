"""A timeline as a picture: one row a rank, one cell an action, as long as it took.

    render_svg    for a page or a file: colours for forward, input gradient, weight
                  gradient and full backward, numbers of micro-batches; later
                  chunks of a rank, and the other direction, are paler; the
                  halves of an overlapped pair share one cell
    render_text   for a terminal

The colours differ in lightness as well as in hue, and follow the page's choice of light
or dark, or else the reader's.
"""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from xtrain.schedules.action import Action
from xtrain.schedules.simulate import Timeline

ROW, GAP, LEFT, TOP, FOOT = 26, 6, 58, 8, 54
WIDEST, CELL = 960, (9.0, 30.0)
NAMES = {
    "F": "forward",
    "B": "gradient of the input",
    "W": "gradient of the weights",
    "BW": "backward (both)",
}
STYLE = """
.xs{--f:#1f6fb5;--b:#b4470c;--bw:#8c3a0a;--w:#5c8f2b;--ink:#1c2530;--faint:#5f6b79;
--line:#d5cdbf;font:600 11px system-ui,sans-serif}
@media (prefers-color-scheme:dark){.xs{--f:#2874bb;--b:#c25a1c;--bw:#a04a17;--w:#4e7d24;
--ink:#e4eaf1;--faint:#98a5b4;--line:#3c4a5c}}
[data-md-color-scheme=default] .xs{--f:#1f6fb5;--b:#b4470c;--bw:#8c3a0a;--w:#5c8f2b;
--ink:#1c2530;--faint:#5f6b79;--line:#d5cdbf}
[data-md-color-scheme=slate] .xs{--f:#2874bb;--b:#c25a1c;--bw:#a04a17;--w:#4e7d24;
--ink:#e4eaf1;--faint:#98a5b4;--line:#3c4a5c}
.xs rect{stroke:#fff;stroke-opacity:.55}
.xs .idle{fill:none;stroke:var(--line);stroke-opacity:1}
.xs .n,.xs .p{fill:#fff;text-anchor:middle;font-size:10px}.xs .p{fill:var(--ink)}
.xs .l{fill:var(--ink)}.xs .t{fill:var(--faint);font-weight:400;text-anchor:middle}
.xs .g{fill:var(--faint);font-weight:400}
"""


def render_svg(
    timeline: Timeline, title: str | None = None, scale: float | None = None
) -> str:
    """The timeline as an SVG document, as wide as its actions need (9 px or more each).

    Args:
        title: for readers who do not see it; by default the schedule's name and sizes.
        scale: pixels for a time of 1, for several drawings that are to be compared.

    Raises:
        ValueError: `scale` is not above 0.
    """
    if scale is not None and not scale > 0:
        raise ValueError(f"render_svg: scale={scale}, but it is above 0")
    schedule = timeline.schedule
    shortest = _shortest(timeline)
    begin, span = min(s[0] for s in timeline.starts), timeline.makespan or 1.0
    if scale is None:
        scale = min(max(WIDEST / span, CELL[0] / shortest), CELL[1] / shortest)
    width = LEFT + span * scale + 12
    legend, depth = _legend(timeline, width)
    foot = TOP + schedule.ranks * (ROW + GAP)
    height = foot + FOOT - 18 + depth
    words = title or (
        f"Timeline of {schedule.name}: {schedule.ranks} ranks, "
        f"{schedule.micro_batches} micro-batches"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="xs" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"><title>{html.escape(words)}</title>'
        f"<style>{STYLE}</style>"
    ]
    for rank in range(schedule.ranks):
        parts += _row(timeline, rank, begin, scale)
    parts += _axis(span, scale, foot)
    return "".join([*parts, *legend(foot + 34), "</svg>"])


def _row(timeline: Timeline, rank: int, begin: float, scale: float) -> list[str]:
    """One rank: its name, the time it has actions, and the actions."""
    top = TOP + rank * (ROW + GAP)
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    x, wide = LEFT + (starts[0] - begin) * scale, (ends[-1] - starts[0]) * scale
    parts = [
        f'<text class="l" x="0" y="{top + 17}">rank {rank}</text>',
        f'<rect class="idle" x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{ROW}"/>',
    ]
    actions = timeline.schedule.actions[rank]
    for action, start, end in zip(actions, starts, ends, strict=True):
        left, wide = LEFT + (start - begin) * scale, (end - start) * scale
        parts += _cell(timeline, action, left, top, wide)
    return parts


def _rows(timeline: Timeline) -> Iterator[tuple[Sequence[float], Sequence[float]]]:
    return zip(timeline.starts, timeline.ends, strict=True)


def _shortest(timeline: Timeline) -> float:
    """The time of the shortest action, without those below a tenth of the mean.

    A stage that is next to nothing would make the drawing of all others too wide.
    """
    times = [
        end - start
        for starts, ends in _rows(timeline)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]
    mean = sum(times) / max(len(times), 1)
    return min((time for time in times if 10 * time > mean), default=1.0)


def _cell(
    timeline: Timeline, action: Action, left: float, top: float, wide: float
) -> Iterator[str]:
    """One rectangle with its number; two, one above the other, for a pair."""
    high = ROW / len(action.parts)
    for row, part in enumerate(action.parts):
        y = top + row * high
        pale = _paleness(timeline, part)
        yield (
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
            f'style="fill:var(--{part.kind.lower()});fill-opacity:{1 - pale:.2f}">'
            f"<title>{part}</title></rect>"
        )
        number = str(part.micro_batch)
        if wide > 6.2 * len(number) + 1.5:
            yield (
                f'<text class="{"p" if pale > 0.2 else "n"}" x="{left + wide / 2:.1f}" '
                f'y="{y + high / 2 + (4 if high > 20 else 3.8):.1f}">{number}</text>'
            )


def _paleness(timeline: Timeline, part: Action) -> float:
    """Later chunks of a rank are paler, and so is the other direction."""
    schedule = timeline.schedule
    if schedule.placement == "mirror":
        return 0.45 * (part.micro_batch >= schedule.micro_batches // 2)
    return 0.45 * (part.stage // schedule.ranks) / max(schedule.chunks - 1, 1)


def _axis(span: float, scale: float, y: float) -> Iterator[str]:
    """Times below the rows, as many as have room."""
    step = 1.0
    while step * scale < 34:
        step *= 2 if f"{step:g}"[0] in "15" else 2.5
    at = 0.0
    while at <= span + 1e-9:
        yield f'<text class="t" x="{LEFT + at * scale:.1f}" y="{y + 10}">{at:g}</text>'
        at += step


def _legend(
    timeline: Timeline, width: float
) -> tuple[Callable[[float], Iterator[str]], float]:
    """What the colours mean: a function that draws it at a height; how high it is."""
    actions = timeline.schedule.actions
    kinds = {part.kind for action in chain(*actions) for part in action.parts}
    shown = [kind for kind in NAMES if kind in kinds]
    places, x, row = [], 0.0, 0
    for kind in shown:
        wide = 24 + 6.6 * len(NAMES[kind])
        if x and x + wide > width:
            x, row = 0.0, row + 1
        places.append((kind, x, row))
        x += wide + 12

    def draw(top: float) -> Iterator[str]:
        for kind, x, row in places:
            y = top + 20 * row
            yield (
                f'<rect x="{x:.0f}" y="{y - 10}" width="14" height="14" '
                f'style="fill:var(--{kind.lower()})"/>'
                f'<text class="g" x="{x + 20:.0f}" y="{y + 1}">{NAMES[kind]}</text>'
            )

    return draw, 20 * (row + 1)


def render_text(timeline: Timeline) -> str:
    """The timeline for a terminal: F0 B0 W0 BW0, a pair as F4&B1, waiting as dots.

    With several chunks a rank, the stage is written, too: 5F0.

    Columns are times: an action is shown where it begins, and `-` as long as it lasts.
    """
    schedule = timeline.schedule
    shortest = _shortest(timeline)
    named = schedule.chunks > 1
    texts = [[_short(action, named) for action in row] for row in schedule.actions]
    need = max(
        (
            (len(text) + 1) * shortest / (end - start)
            for row, (starts, ends) in zip(texts, _rows(timeline), strict=True)
            for text, start, end in zip(row, starts, ends, strict=True)
            if end > start
        ),
        default=1.0,
    )
    column = shortest / -(-need // 1)  # the time of one character
    begin = min(s[0] for s in timeline.starts)
    lines = []
    for rank, (starts, ends) in enumerate(_rows(timeline)):
        line = ""
        for text, start, end in zip(texts[rank], starts, ends, strict=True):
            line = line.ljust(round((start - begin) / column), ".")
            line += text.ljust(max(round((end - start) / column) - 1, 0), "-") + " "
        lines.append(f"rank {rank:<3} {line.rstrip()}")
    return "\n".join(lines)


def _short(action: Action, with_stage: bool) -> str:
    """An action without its stage, which its rank tells unless it holds several."""
    text = str(action)
    return text if with_stage else re.sub(r"\d+(?=[BFW])", "", text)
