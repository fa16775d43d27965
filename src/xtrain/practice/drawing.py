"""Draws what a file does on a few ranks: its messages, step by step, and who waits.

    frame 0     what each rank has
    frame k     the messages of second k as arrows, and what each rank has then
    last        ranks that wait without end, with whom they wait for

Each frame is HTML that a page shows as it is.
"""

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from xtrain.practice.demos import DEMOS, Demo, labels
from xtrain.practice.replay import LIMIT
from xtrain.practice.replay_calls import Call
from xtrain.practice.replay_ranks import Ranks
from xtrain.testing.errors import RankError

CELL, ROW, TOP, SIDE, NAME = 44, 40, 26, 92, 58
MOST_FRAMES = 40


@dataclass
class Message:
    """One message that has arrived."""

    end: float
    source: int
    target: int
    holds: list[float]
    lines: tuple[int, int]


@dataclass
class Shot:
    """What the tensors of a rank hold at a moment."""

    clock: float
    cells: dict[str, list[float]]


@dataclass
class Drawn:
    """A run, as it is drawn."""

    size: int
    messages: list[Message] = field(default_factory=list)
    shots: dict[int, list[Shot]] = field(default_factory=dict)
    waits: dict[int, Call] = field(default_factory=dict)
    problem: str = ""
    printed: str = ""


def drawn(name: str, load: Callable[[], Any], size: int, buffered: bool) -> Drawn:
    """Run a file's function on the small inputs of its drill."""
    found = Drawn(size)
    ranks = Ranks(size, LIMIT, buffered)

    def arrived(send: Call, receive: Call) -> None:
        found.messages.append(
            Message(receive.end or 0.0, send.rank, receive.rank, send.given[0],
                    (send.line, receive.line))
        )  # fmt: skip

    def program() -> None:
        rank = dist.get_rank()
        demo = DEMOS[name](rank, size)
        shots = found.shots[rank] = []

        def look() -> None:
            shots.append(Shot(ranks.current.clock, cells_of(demo)))

        looks[rank] = look
        look()
        result = load()(*demo.args, **demo.named)
        if isinstance(result, Tensor) and result.numel() <= 4 * size:
            demo.shown["returned"] = result
        look()

    looks: dict[int, Callable[[], None]] = {}
    ranks.watch, ranks.seen = arrived, lambda: looks[ranks.current.number]()
    try:
        ranks.run(program)
    except (Exception, SystemExit) as error:
        cause = error.first.exception if isinstance(error, RankError) else error
        found.problem = type(cause).__name__
    found.printed = "".join(
        f"rank {rank.number}: {line}\n"
        for rank in ranks.ranks
        for line in rank.printed.text.splitlines()[:20]
    )
    found.waits = {
        rank.number: rank.waits for rank in ranks.ranks if rank.waits is not None
    }
    return found


def cells_of(demo: Demo) -> dict[str, list[float]]:
    """The numbers of the tensors that are drawn."""
    found = {}
    for what, value in demo.shown.items():
        parts = value if isinstance(value, list) else [value]
        found[what] = [float(n) for tensor in parts for n in tensor.values()]
    return found


def frames(name: str, run: Drawn) -> list[str]:
    """A picture of each second."""
    ends = sorted({message.end for message in run.messages})[:MOST_FRAMES]
    text = labels(name, run.size)
    pictures = [picture(run, 0.0, [], text, "The start: what each rank has.")]
    before = 0.0
    for step, end in enumerate(ends, start=1):
        arriving = [m for m in run.messages if m.end == end]
        arriving.sort(key=lambda message: message.source)
        words = "; ".join(in_words(m, text) for m in arriving[:8])
        caption = f"Step {step} of {len(ends)}: {words}."
        pictures.append(picture(run, end, arriving, text, caption, before))
        before = end
    if run.waits:
        words = ", ".join(
            f"rank {rank} waits in line {call.line} for rank "
            f"{', '.join(map(str, call.missing[:3]))}"
            for rank, call in sorted(run.waits.items())
        )
        pictures.append(picture(run, before, [], text, f"Without end: {words}.", -1))
    return pictures


def in_words(message: Message, text: Callable[[float], str]) -> str:
    return f"{message.source} → {message.target}: {contents(message, text)}"


def contents(message: Message, text: Callable[[float], str]) -> str:
    """What a message holds, in short."""
    few = [text(value) for value in message.holds[:6]]
    return ", ".join(few) + ", …" * (len(message.holds) > 6)


def state(run: Drawn, rank: int, time: float) -> dict[str, list[float]]:
    """What a rank has at a time: the last that was seen by then."""
    shots = [s for s in run.shots.get(rank, []) if s.clock <= time + 1e-6]
    return shots[-1].cells if shots else {}


def picture(
    run: Drawn, time: float, arriving: list[Message], text: Callable[[float], str],
    caption: str, before: float | None = None,
) -> str:  # fmt: skip
    """One frame: a row of cells for each rank, arrows beside them."""
    states = [state(run, rank, time) for rank in range(run.size)]
    olds = [state(run, rank, time if before is None or before < 0 else before)
            for rank in range(run.size)]  # fmt: skip
    widths: dict[str, int] = {}
    for cells in states:
        for what, numbers in cells.items():
            widths[what] = max(widths.get(what, 1), len(numbers))
    parts = [*heads(widths)]
    for rank, cells in enumerate(states):
        parts += row(rank, cells, olds[rank], widths, text)
    colours = "".join(
        arrow(m.source, m.target, "xd-arrow", f"var(--xt-r{m.source % 8})")
        for m in arriving
    )
    if before is not None and before < 0:
        colours = "".join(
            arrow(rank, other, "xd-wait", "var(--xt-bad)")
            for rank, call in run.waits.items()
            for other in call.missing[:3]
        )
    width = SIDE + NAME + sum(n * CELL + 14 for n in widths.values()) + 4
    height = TOP + run.size * ROW + 4
    words = html.escape(caption)
    return (
        f'<figure class="xd-frame"><div class="xd-box" tabindex="0">'
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{words}">{"".join(parts)}{colours}</svg></div>'
        f"<figcaption>{words}</figcaption></figure>"
    )


def heads(widths: dict[str, int]) -> Iterator[str]:
    """The tensors' names above their columns."""
    x = SIDE + NAME
    for what, count in widths.items():
        yield f'<text class="xd-head" x="{x}" y="{TOP - 10}">{what}</text>'
        x += count * CELL + 14


def row(
    rank: int, cells: dict[str, list[float]], old: dict[str, list[float]],
    widths: dict[str, int], text: Callable[[float], str],
) -> Iterator[str]:  # fmt: skip
    """A rank's name and its cells; those that changed are marked."""
    y = TOP + rank * ROW
    yield (
        f'<text class="xd-rank" x="{SIDE}" y="{y + 20}" fill="var(--xt-r{rank % 8})">'
        f"rank {rank}</text>"
    )
    x = SIDE + NAME
    for what, count in widths.items():
        numbers, were = cells.get(what, []), old.get(what, [])
        for i, number in enumerate(numbers):
            label = text(number)
            new = i >= len(were) or text(were[i]) != label
            kind = "xd-cell xd-new" if new else "xd-cell"
            yield (
                f'<rect class="{kind}" x="{x + i * CELL}" y="{y}" width="{CELL - 2}" '
                f'height="{ROW - 8}" rx="4"/><text class="xd-number" '
                f'x="{x + i * CELL + CELL / 2 - 1}" y="{y + 20}">{label}</text>'
            )
        x += count * CELL + 14


def arrow(source: int, target: int, kind: str, colour: str) -> str:
    """An arc on the left, from one row to another, wider for a longer way."""
    a, b = (TOP + rank * ROW + ROW / 2 - 4 for rank in (source, target))
    a, b = (a + 5, b - 5) if a < b else (a - 5, b + 5)
    reach = SIDE - 10 - min(78, 22 + 12 * abs(source - target))
    end = SIDE - 8
    tip = f"M{end - 7} {b - 4}L{end} {b}L{end - 7} {b + 4}"
    return (
        f'<path class="{kind}" stroke="{colour}" fill="none" d="M{end} {a}'
        f'C{reach} {a} {reach} {b} {end - 2} {b}{tip}"/>'
    )


def table(name: str, run: Drawn) -> str:
    """All messages, in their order."""
    text = labels(name, run.size)
    head = "".join(
        f'<th scope="col">{h}</th>'
        for h in ("second", "from", "to", "numbers", "holds", "sent in line")
    )
    ordered = sorted(run.messages, key=lambda m: (m.end, m.source))
    body = "".join(
        f"<tr><td>{m.end:g}</td><td>{m.source}</td><td>{m.target}</td>"
        f"<td>{len(m.holds)}</td><td>{html.escape(contents(m, text))}</td>"
        f"<td>{m.lines[0] or ''}</td></tr>"
        for m in ordered[:200]
    )
    caption = f"Messages of this file on {run.size} ranks"
    return (
        f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
