"""A training step on a virtual cluster, as pages of this lecture trace and draw it.

program      clocks of the moments that a page needs, the first one its begin
recorded     the run from that moment on
rows_svg     rows of pieces below one another, on one axis of time
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from xtrain.cluster import RunRecord, Topology, VirtualCluster
from xtrain.cluster.draw import LEFT, RIGHT, Piece, box, document
from xtrain.plan.hardware import Accelerator

from ... import config
from ...amounts import seconds

GPU = Accelerator.preset("h100")
WIDE, ROW = 480, 26.0
Mark = tuple[float, str, str]
"""A moment, "start" or "end" as the side its words have, and the words."""


def recorded(
    topology: Topology,
    accelerator: Accelerator,
    program: Callable[..., Any],
    *arguments: Any,
) -> tuple[RunRecord, list[Any]]:
    """What four ranks did, from the begin that rank 0 gives, and what each gave."""
    cluster = VirtualCluster(
        4, topology, accelerator=accelerator, record=True, checks=False
    )
    results = cluster.run(program, *arguments)
    assert cluster.record is not None
    return since(cluster.record, results[0][0]), results


def since(record: RunRecord, begun: float) -> RunRecord:
    """A record that begins at a moment in which no rank waits."""

    def moved(pieces: Sequence[Any]) -> list[Any]:
        late = [p for p in pieces if p.start >= begun]
        return [p._replace(start=p.start - begun, end=p.end - begun) for p in late]

    return replace(
        record, seconds=[clock - begun for clock in record.seconds],
        waits=[moved(waits) for waits in record.waits],
        transfers=moved(record.transfers),
    )  # fmt: skip


def spans_of(record: RunRecord, rank: int) -> list[Piece]:
    """Of a rank: kind, begin, end, and the call it waits in."""
    return [(s.kind, s.start, s.end, s.call) for s in record.spans(rank)]


def without_folder(found: dict[str, Any]) -> dict[str, Any]:
    """As JSON. A wait names the line of its call: here in this project's own files."""
    text = json.dumps(found).replace(f"{config.ROOT}/", "")
    here: dict[str, Any] = json.loads(text)
    return here


def rows_svg(
    rows: Mapping[str, Iterable[Piece]],
    end: float,
    title: str,
    lines: Iterable[float] = (),
    marks: Iterable[Mark] = (),
) -> str:
    """Rows of pieces, upright lines at some moments, and words above them.

    Args:
        rows: by name; pieces without words compute.
        end: seconds, the right edge.
    """
    scale = (WIDE - LEFT - RIGHT) / end
    parts = []
    for row, (name, pieces) in enumerate(rows.items()):
        y = 18 + ROW * row
        parts.append(f'<text class="l" x="0" y="{y + 13}">{name}</text>')
        for kind, start, stop, words in pieces:
            piece = (kind, start, stop, words or "computes")
            low = 0.2 * (ROW - 8) if kind == "wait" else 0.0
            parts.append(box(piece, scale, y + low, ROW - 8 - 2 * low, True))
    foot = 18 + ROW * len(rows)
    for x in lines:
        parts.append(f'<path class="a" d="M{LEFT + x * scale:.1f} 14V{foot}"/>')
    below = (end, "end", seconds(end))
    for y, (x, anchor, words) in [*((10, mark) for mark in marks), (foot + 10, below)]:
        place = f'x="{LEFT + x * scale:.1f}" y="{y}" text-anchor="{anchor}"'
        parts.append(f'<text class="t" {place}>{words}</text>')
    return document(WIDE, foot + 14, parts, title)
