"""Tables and the picture of grouped heads: who holds which, and what replicas send."""

from collections.abc import Sequence

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import cell, document, fit, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from .modules import backward, sent

WIDTH, EDGE, LEFT, TOP, HIGH, GAP = 400, 394, 62, 32.0, 32, 14


@TABLES
def gqa_gradients(heads: int = 8, key_heads: int = 2, ranks: int = 4) -> Table:
    """Shares of a key head's gradient by rank, before and after the replicas' sum."""
    from .runs_heads import heads_held, shares_of_key_gradient

    held = runs.remembered(heads_held, ranks, heads, key_heads)
    found = runs.remembered(shares_of_key_gradient, ranks, heads, key_heads)
    rows = []
    for rank, (mine, shares) in enumerate(zip(held, found, strict=True)):
        if shares["summed, error"] > 1e-12:
            raise EvidenceError(f"rank {rank}: the sum is no true gradient: {shares}")
        rows.append([str(rank), in_list(mine["q"]), in_list(mine["k"]),
                     f"{shares['alone']:.3f}", f"{shares['summed']:.3f}"])  # fmt: skip
    if abs(sum(shares["alone"] for shares in found) - key_heads) > 1e-12:
        raise EvidenceError(f"the shares do not add up to 1 for each key head: {found}")
    header = ["rank", "query heads", "key head", "its own share", "after the sum"]
    return Table(header, rows, "rllrr")


def in_list(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


@TABLES
def gqa_traffic(heads: int = 24, ranks: int = 4) -> Table:
    """Calls and bytes of attention's backward by the number of key heads."""
    from .runs_modules import HEAD_DIM, HIDDEN
    from .runs_modules import calls as run

    rows = []
    for key_heads in (heads, ranks, ranks // 2, 1):
        replicas = max(1, ranks // key_heads)
        weight = HEAD_DIM * HIDDEN * runs.ITEMSIZE
        activations = sent(backward("all-reduce", "bsh"), ranks, 0)
        formula = [activations, *[weight] * (2 * (replicas - 1))]
        for of_rank in runs.remembered(run, ranks, "attention", key_heads):
            found = [call[3] for call in of_rank if call[0] == "backward"]
            if found != formula:
                raise EvidenceError(f"{key_heads} key heads: {found}, not {formula}")
        rows.append([str(key_heads), str(replicas), count(formula[0]),
                     count(sum(formula[1:])) if replicas > 1 else "-"])  # fmt: skip
    header = ["key heads", "ranks per key head", "all-reduce of dX, bytes",
              "to replicas, bytes"]  # fmt: skip
    return Table(header, rows, "rrrr")


@FIGURES
def gqa_heads(heads: int = 8, key_heads: int = 2, ranks: int = 4) -> str:
    """Which query and key heads lie in each rank's weights, read from the weights."""
    from .runs_heads import heads_held

    return gqa_chart(runs.remembered(heads_held, ranks, heads, key_heads), heads)


def gqa_chart(found: list[dict[str, list[int]]], heads: int) -> str:
    """What `heads_held` gives by rank; EvidenceError unless each query has its key."""
    key_heads = 1 + max(head for held in found for head in held["k"])
    group = heads // key_heads
    if sorted(q for held in found for q in held["q"]) != list(range(heads)):
        raise EvidenceError(f"not every query head is held once: {found}")
    queries, keys = (max(len(held[kind]) for held in found) for kind in "qk")
    right = 84
    wide = (EDGE - LEFT - right - 2 * GAP) / (queries + keys)
    at_keys = LEFT + queries * wide + GAP
    at_with = at_keys + keys * wide + GAP
    parts = [
        text(LEFT, 18, "query heads", "xt-label"),
        text(at_keys, 18, "key", "xt-label"),
        text(at_with, 18, "same key on", "xt-label"),
    ]
    words = []
    for rank, held in enumerate(found):
        if held["k"] != held["v"] or {q // group for q in held["q"]} != set(held["k"]):
            raise EvidenceError(f"rank {rank} lacks a key of its queries: {held}")
        y = TOP + HIGH * rank
        parts.append(text(6, y + 16.5, f"rank {rank}", "xt-tick"))
        for place, head in enumerate(held["q"]):
            x = LEFT + place * wide
            parts += cell(x, y, wide - 4, 24, head // group, f"q{head}")
        for place, head in enumerate(held["k"]):
            parts += cell(at_keys + place * wide, y, wide - 4, 24, head, f"k{head}")
        parts.append(text(at_with, y + 16.5, sharing(rank, held["with"]), "xt-tick"))
        words.append(f"rank {rank}: queries {held['q']}, key heads {held['k']}")
    drawing = document(WIDTH, int(TOP + HIGH * len(found)), parts,
                       "Heads in each rank's weights", "; ".join(words))  # fmt: skip
    return fit(drawing, WIDTH)


def sharing(rank: int, held_by: Sequence[int]) -> str:
    """The other ranks that hold the same key head."""
    others = [str(r) for r in held_by if r != rank]
    return f"rank {', '.join(others)}" if others else "no other"
