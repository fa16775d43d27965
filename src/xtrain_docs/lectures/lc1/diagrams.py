"""More pictures of the lc1 pages: who waits for whom, and what is sent for one call."""

import math
import re

from ... import config, runs, values
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import Axis, bar_chart, cell, document, fit, line, rect, text
from .measured import wire
from .tables import WIRE_PAIRS, in_words

WAITING = re.compile(r"^rank (\d+): waiting in (\w+)\(.*?\bdst=(\d+)", re.MULTILINE)


@REGISTRY
def wait_circle(transcript: str) -> str:
    """Who waits for whom, read from the report of a run that was cut.

    Args:
        transcript: an .out file of snippets/ with a line for each rank.
    """
    found = WAITING.findall((config.ROOT / "snippets" / transcript).read_text())
    waits = {int(rank): (call, int(peer)) for rank, call, peer in found}
    if not waits or not set(waits) >= {peer for _, peer in waits.values()}:
        raise EvidenceError(f"{transcript}: no circle of waiting ranks: {found}")
    width, height, radius, node = 340, 250, 84.0, 27.0
    place = {
        rank: (
            width / 2 + 1.3 * radius * math.sin(2 * math.pi * i / len(waits)),
            height / 2 + 18 - radius * math.cos(2 * math.pi * i / len(waits)),
        )
        for i, rank in enumerate(sorted(waits))
    }
    parts: list[str] = []
    for rank, (_, peer) in waits.items():
        parts += _arrow(place[rank], place[peer], node + 4)
    for rank, (x, y) in place.items():
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{node}" '
            f'class="xt-bar-fill xt-s{rank % 8}" fill-opacity="0.28"/>',
            text(x, y + 0.5, f"rank {rank}", "xt-label", "middle"),
            text(x, y + 14, f"in {waits[rank][0]}", "xt-tick", "middle"),
        ]
    words = "; ".join(f"rank {r} in {c} to rank {p}" for r, (c, p) in waits.items())
    return fit(document(width, height, parts, "Who waits for whom", words), width)


def _arrow(
    start: tuple[float, float], end: tuple[float, float], gap: float
) -> list[str]:
    """A line from one circle to another, with a head."""
    (x1, y1), (x2, y2) = start, end
    length = math.hypot(x2 - x1, y2 - y1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    tip = (x2 - gap * dx, y2 - gap * dy)
    back = (tip[0] - 11 * dx, tip[1] - 11 * dy)
    head = [
        tip,
        (back[0] - 5 * dy, back[1] + 5 * dx),
        (back[0] + 5 * dy, back[1] - 5 * dx),
    ]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in head)
    return [
        line(x1 + gap * dx, y1 + gap * dy, *back, "xt-mark"),
        f'<polygon points="{points}" class="xt-bar-fill xt-s3"/>',
    ]


REPORT = re.compile(
    r"^  rank (\d+): .*?\brank (\d+) (?:died|left|\(stopped\))", re.MULTILINE
)
FATE = re.compile(r"^rank (\d+) (\w+)$", re.MULTILINE)


@REGISTRY
def named_ranks(transcript: str) -> str:
    """Which rank each survivor named as lost, read from what a program printed.

    Args:
        transcript: an .out file of snippets/ with a part for each fate of a rank.
    """
    printed = (config.ROOT / "snippets" / transcript).read_text()
    _, *parts = FATE.split(printed)
    rows = [
        (fate, int(lost), dict(REPORT.findall(reports)))
        for lost, fate, reports in zip(
            parts[::3], parts[1::3], parts[2::3], strict=True
        )
    ]
    if not rows or not all(named for _, _, named in rows):
        raise EvidenceError(f"{transcript}: no reports of lost ranks")
    ranks = 1 + max(int(r) for _, lost, named in rows for r in (*named, lost))
    wide, high, top, left = 78, 40, 30, 8
    drawn = [
        text(
            left + (wide - 6) / 2 + rank * wide,
            18,
            f"rank {rank}",
            "xt-label",
            "middle",
        )
        for rank in range(ranks)
    ]
    said = []
    for row, (fate, lost, named) in enumerate(rows):
        for rank in range(ranks):
            x, y = left + rank * wide, top + row * high
            words = fate if rank == lost else f"names {named.get(str(rank), 'none')}"
            colour = 1 if rank == lost else 2
            drawn += cell(x, y, wide - 6, high - 8, colour, words, radius=6, low=5)
        by = ", ".join(f"rank {r} names rank {n}" for r, n in named.items())
        said.append(f"rank {lost} {fate}: {by}")
    width, height = 2 * left + ranks * wide, top + len(rows) * high
    title = "Which rank the survivors name"
    return fit(document(width, height, drawn, title, "; ".join(said)), width)


@REGISTRY
def wire_bars(ranks: int = 4, mebibytes: float = 1.5) -> str:
    """Ours and gloo's own: what an average rank's sockets sent, in full tensors."""
    size = int(mebibytes * 2**20)
    bars: dict[str, dict[str, float]] = {}
    for ours, theirs in WIRE_PAIRS:
        numel = size // runs.ITEMSIZE
        counted = {
            "ours, payload": wire(f"xtrain.{ours}", numel, ranks)["payload"],
            "ours, on the wire": wire(f"xtrain.{ours}", numel, ranks)["wire"],
            "gloo's own, on the wire": wire(f"torch.{theirs}", numel, ranks)["wire"],
        }
        bars[in_words(ours).removeprefix("ring ")] = {
            name: sum(n for n in numbers if n is not None) / len(numbers) / size
            for name, numbers in counted.items()
            if None not in numbers  # only Linux counts what is on the wire
        }
    return fit(
        bar_chart(
            bars,
            Axis("bytes sent by an average rank (M: the tensor)", format=_tensors),
            f"Bytes of one call on {ranks} ranks",
            f"A tensor of {values.bytes_(size)}; averages over the ranks.",
        ),
        400,
    )


def _tensors(value: float) -> str:
    return f"{value:.2f} M"


@REGISTRY
def messages_of_an_object(layers: int = 24) -> str:
    """The messages of one `send_object`, with their bytes, from a real run."""
    from .runs import object_messages

    (sent, _) = runs.remembered(object_messages, 2, layers)
    width, left = 380, 66
    longest = max(sent)
    parts: list[str] = []
    for row, (what, size) in enumerate(zip(("length", "pickle"), sent, strict=True)):
        y = 8 + 34 * row
        long = max(3.0, (width - left - 90) * size / longest)
        parts += [
            text(left - 8, y + 17, what, "xt-label", "end"),
            rect(left, y, long, 24, row, opacity=0.5, radius=4),
            text(left + long + 8, y + 17, values.bytes_(size), "xt-value-text"),
        ]
    words = f"a length of {sent[0]} bytes, then a pickle of {sent[1]} bytes"
    return fit(
        document(width, 78, parts, "The two messages of an object", words), width
    )
