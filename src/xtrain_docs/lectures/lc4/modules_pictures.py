"""Pictures of the lc4 pages on single modules, drawn from what ranks held and sent."""

import math
from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import Axis, bar_chart, document, fit, line_chart, text

WIDTH, EDGE = 400, 394


def box(x: float, y: float, width: float, colour: int | None, words: str) -> list[str]:
    """A cell with words in it, filled in the colour of a series or empty."""
    fill = (
        'class="xt-axis" fill="none"'
        if colour is None
        else f'class="xt-bar-fill xt-s{colour % 8}" fill-opacity="0.28"'
    )
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}"'
    return [
        f'<rect {place} height="24" rx="3" {fill}/>',
        text(x + width / 2, y + 16.5, words, "xt-label", "middle"),
    ]


# ---------------------------------------------------------------- grouped heads


@REGISTRY
def gqa_heads(heads: int = 8, key_heads: int = 2, ranks: int = 4) -> str:
    """Which query and key heads lie in each rank's weights, read from the weights."""
    from .runs_modules import heads_held

    return gqa_chart(runs.remembered(heads_held, ranks, heads, key_heads), heads)


def gqa_chart(found: list[dict[str, list[int]]], heads: int) -> str:
    """What `heads_held` gives by rank; EvidenceError unless each query has its key."""
    key_heads = 1 + max(head for held in found for head in held["k"])
    group = heads // key_heads
    if sorted(q for held in found for q in held["q"]) != list(range(heads)):
        raise EvidenceError(f"not every query head is held once: {found}")
    queries = max(len(held["q"]) for held in found)
    left, top = 62, 32.0
    keys = max(len(held["k"]) for held in found)
    right = 84
    wide = (EDGE - left - right - 2 * 14) / (queries + keys)
    at_keys = left + queries * wide + 14
    at_with = at_keys + keys * wide + 14
    parts = [
        text(left, 18, "query heads", "xt-label"),
        text(at_keys, 18, "key", "xt-label"),
        text(at_with, 18, "same key on", "xt-label"),
    ]
    words = []
    for rank, held in enumerate(found):
        if held["k"] != held["v"] or {q // group for q in held["q"]} != set(held["k"]):
            raise EvidenceError(f"rank {rank} lacks a key of its queries: {held}")
        y = top + 32 * rank
        parts.append(text(6, y + 16.5, f"rank {rank}", "xt-tick"))
        for place, head in enumerate(held["q"]):
            parts += box(left + place * wide, y, wide - 4, head // group, f"q{head}")
        for place, head in enumerate(held["k"]):
            parts += box(at_keys + place * wide, y, wide - 4, head, f"k{head}")
        others = [r for r in held["with"] if r != rank]
        shared = "rank " + ", ".join(map(str, others)) if others else "no other"
        parts.append(text(at_with, y + 16.5, shared, "xt-tick"))
        words.append(f"rank {rank}: queries {held['q']}, key heads {held['k']}")
    drawing = document(WIDTH, int(top + 32 * len(found)), parts,
                       "Heads in each rank's weights", "; ".join(words))  # fmt: skip
    return fit(drawing, WIDTH)


@REGISTRY
def rope_slowing() -> str:
    """How much Llama 3.1's scaling slows a pair, by its turns in the old length."""
    from .runs_modules import rope_slowdown

    (slower,) = runs.remembered(rope_slowdown, 1, -2, 4, 8)
    return line_chart(
        {"how much slower a pair turns": [(turns, times) for turns, times in slower]},
        Axis("turns of a pair within the original length", "log2", lambda n: f"{n:g}"),
        Axis("times slower", "linear", lambda n: f"{n:g}"),
        "Rotary frequencies of Llama 3.1",
        "Slow pairs are slowed by the factor, fast ones not at all.",
        width=WIDTH,
    )


# ---------------------------------------------------------------- embedding


@REGISTRY
def embedding_lookup(
    ids: tuple[int, ...] = (0, 3, 4, 7, 4), vocabulary: int = 8, ranks: int = 2
) -> str:
    """Each rank's rows, what it looks up, and the sum of all ranks."""
    from .runs_modules import embedding_parts

    found = runs.remembered(embedding_parts, ranks, list(ids), vocabulary)
    return embedding_chart(found, list(ids))


def embedding_chart(found: list[dict[str, list[float]]], ids: list[int]) -> str:
    """What `embedding_parts` gives; EvidenceError unless one rank has each id."""
    for place, number in enumerate(ids):
        owners = [held for held in found if held["partial"][place]]
        sums = {held["sum"][place] for held in found}
        if len(owners) != 1 or sums != {number + 1.0}:
            raise EvidenceError(f"id {number}: {found}")
    left, high = 150, 32
    cell = (EDGE - left) / len(ids)
    parts = [text(6, 20, "ids, on every rank", "xt-label")]
    for place, number in enumerate(ids):
        parts += box(left + place * cell, 4, cell - 4, None, str(number))
    y = 4.0 + high
    for rank, held in enumerate(found):
        low, up = int(held["rows"][0]) - 1, int(held["rows"][-1]) - 1
        parts.append(text(6, y + 16.5, f"rank {rank}, rows {low} to {up}", "xt-tick"))
        for place, value in enumerate(held["partial"]):
            words = f"row {value - 1:g}" if value else "0"
            parts += box(
                left + place * cell, y, cell - 4, rank if value else None, words
            )
        y += high
    parts.append(text(6, y + 16.5, "sum, on every rank", "xt-label"))
    for place, value in enumerate(found[0]["sum"]):
        owner = next(r for r, held in enumerate(found) if held["partial"][place])
        parts += box(left + place * cell, y, cell - 4, owner, f"row {value - 1:g}")
    words = "; ".join(f"id {n} is looked up by one rank" for n in dict.fromkeys(ids))
    drawing = document(
        WIDTH, int(y + high), parts, "A vocabulary-parallel lookup", words
    )
    return fit(drawing, WIDTH)


# ---------------------------------------------------------------- the loss

LOGITS = ((1.0, 2.0, 0.0, 3.0), (4.0, 0.0, 1.0, 0.0))
LABELS = (2, 0)


@REGISTRY
def loss_steps(ranks: int = 2) -> str:
    """The numbers of each all-reduce of the loss, token by token."""
    from .runs_modules import loss_parts

    found = runs.remembered(
        loss_parts, ranks, [list(row) for row in LOGITS], list(LABELS)
    )
    return loss_chart(found)


def loss_chart(found: list[dict[str, Any]]) -> str:
    """What `loss_parts` gives by rank; EvidenceError unless the losses are right."""
    for token, (row, label) in enumerate(zip(LOGITS, LABELS, strict=True)):
        loss = math.log(sum(map(math.exp, row))) - row[label]
        if any(abs(held["losses"][token] - loss) > 1e-12 for held in found):
            raise EvidenceError(f"token {token}: the loss is {loss}, not {found}")
    cell, left, wide = 50, 54, 70
    at = [left + len(found[0]["logits"][0]) * cell + 12 + i * wide for i in range(3)]
    parts, words, y = [text(left, 18, "logits", "xt-label")], [], 28.0
    for x, head in zip(at, ("largest", "sum of exp", "label's"), strict=True):
        parts.append(text(x + 32, 18, head, "xt-label", "middle"))
    for token, label in enumerate(LABELS):
        for rank, held in enumerate(found):
            parts.append(text(6, y + 16.5, f"rank {rank}", "xt-tick"))
            for place, logit in enumerate(held["logits"][token]):
                parts += box(left + place * cell, y, cell - 4, rank, f"{logit:g}")
            for x, number in zip(at, sums_of(held, token, 0), strict=True):
                parts += box(x, y, wide - 6, rank, f"{round(number, 3):g}")
            y += 28
        shown = sums_of(found[0], token, 1)
        parts.append(text(6, y + 16.5, f"all ranks; label {label}", "xt-tick"))
        for x, number in zip(at, shown, strict=True):
            parts += box(x, y, wide - 6, None, f"{round(number, 3):g}")
        loss = found[0]["losses"][token]
        equation = f"log {shown[1]:.3f} - ({shown[2]:g}) = {loss:.3f}"
        parts.append(text(EDGE, y + 42, f"loss = {equation}", "xt-value-text", "end"))
        words.append(f"token {token}: the loss is {equation}")
        y += 60
    title = "The three numbers of each token's loss"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def sums_of(held: dict[str, Any], token: int, after: int) -> tuple[float, float, float]:
    """A rank's largest logit, sum of exp and label's logit, before or after the sum."""
    largest, sums = (call[after] for call in held["calls"])
    return largest[token], sums[0][token], sums[1][token]


# ---------------------------------------------------------------- bars


SHORT = {"swiglu": "column, row", "column only": "both columns"}


@REGISTRY
def bytes_of_designs(modules: str = "swiglu,column only", ranks: int = 4) -> str:
    """Bytes that a rank sends in a forward and a backward, by module."""
    from .modules import measured

    bars: dict[str, dict[str, float]] = {}
    for module in modules.split(","):
        found = measured(module, ranks)
        bars[SHORT[module]] = {
            phase: sum(call[3] for call in found if call[0] == phase) / 1024
            for phase in ("forward", "backward")
        }
    chart = bar_chart(
        bars,
        Axis("KiB that one rank sends", "linear", lambda n: f"{n:.3g}"),
        f"Bytes sent by design, {ranks} ranks",
        width=WIDTH,
    )
    return fit(chart, WIDTH)


@REGISTRY
def layer_memory_bars(layer: str = "classic") -> str:
    """Bytes of activations that a layer keeps, as a share of one device's."""
    from .modules import layer_memory

    table = layer_memory(layer)
    numbers = [
        [int(cell.replace("\u00a0", "")) for cell in row[1:3]] for row in table.rows
    ]
    one = numbers[0][0]
    bars = {
        f"{row[0]} ranks" if row[0] != "1" else "1 rank": {
            "tensor-parallel": tensor / one,
            "and sequence-parallel": both / one,
        }
        for row, (tensor, both) in zip(table.rows, numbers, strict=True)
    }
    chart = bar_chart(
        bars,
        Axis("share of what one device keeps", "linear", lambda n: f"{n:.2f}"),
        "Activations that a layer keeps",
        width=WIDTH,
    )
    return fit(chart, WIDTH)
