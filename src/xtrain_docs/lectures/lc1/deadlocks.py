"""Who waits for whom, drawn from the report of a run that was cut."""

import math
import re

from ... import config
from ...figures import REGISTRY
from ...runs import EvidenceError
from ...svg import document, line, text

WAITING = re.compile(
    r"^ *rank (\d+): (?:waiting in )?(\w+)\(.*?\bdst=(\d+)", re.MULTILINE
)
WIDTH, HEIGHT, RADIUS, NODE = 340, 250, 84, 27


@REGISTRY
def wait_circle(transcript: str) -> str:
    """A circle of ranks that send, from an .out file of snippets/, a line for each."""
    found = WAITING.findall((config.ROOT / "snippets" / transcript).read_text())
    waits = {int(rank): (call, int(peer)) for rank, call, peer in found}
    if not waits or not set(waits) >= {peer for _, peer in waits.values()}:
        raise EvidenceError(f"{transcript}: no circle of waiting ranks: {found}")
    place = {}
    for index, rank in enumerate(sorted(waits)):
        turn = 2 * math.pi * index / len(waits)
        x = WIDTH / 2 + 1.3 * RADIUS * math.sin(turn)
        place[rank] = (x, HEIGHT / 2 + 18 - RADIUS * math.cos(turn))
    parts = [
        part
        for rank, (_, peer) in waits.items()
        for part in arrow(place[rank], place[peer])
    ]
    for rank, (x, y) in place.items():
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{NODE}" '
            f'class="xt-bar-fill xt-s{rank % 8}" fill-opacity="0.28"/>',
            text(x, y + 0.5, f"rank {rank}", "xt-label", "middle"),
            text(x, y + 14, f"in {waits[rank][0]}", "xt-tick", "middle"),
        ]
    words = "; ".join(f"rank {r} in {c} to rank {p}" for r, (c, p) in waits.items())
    return document(WIDTH, HEIGHT, parts, "Who waits for whom", words)


def arrow(start: tuple[float, float], end: tuple[float, float]) -> list[str]:
    """A line from one circle to another, with a head."""
    length = math.dist(start, end)
    dx, dy = ((e - s) / length for s, e in zip(start, end, strict=True))

    def at(along: float, aside: float = 0) -> tuple[float, float]:
        return start[0] + along * dx - aside * dy, start[1] + along * dy + aside * dx

    tip, back = length - NODE - 4, length - NODE - 15
    head = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(tip), at(back, 5), at(back, -5)))
    return [
        line(*at(NODE + 4), *at(back), "xt-mark"),
        f'<polygon points="{head}" class="xt-bar-fill xt-s3"/>',
    ]
