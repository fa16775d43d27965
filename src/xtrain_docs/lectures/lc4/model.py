"""Tables of the page on the whole model: what each part of it calls and sends."""

from itertools import product

from xtrain.plan import collective_traffic

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table

PARTS = ("embedding", "layer", "head", "loss")
Calls = dict[str, int]

# What each part calls on [batch, sequence, hidden]: forward, backward.
WHOLE: dict[str, tuple[Calls, Calls]] = {
    "embedding": ({"all_reduce": 1}, {}),
    "layer": ({"all_reduce": 2}, {"all_reduce": 2}),
    "head": ({}, {"all_reduce": 1}),
}
# In slices of the sequence; the weights of norms are summed by an all-reduce each.
SLICED: dict[str, tuple[Calls, Calls]] = {
    "embedding": ({"reduce_scatter": 1}, {"all_gather": 1}),
    "layer": (
        {"all_gather": 2, "reduce_scatter": 2},
        {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 2},
    ),
    "head": (
        {"all_gather": 1},
        {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1},
    ),
}


def sent(name: str, numel: int, ranks: int, rank: int) -> int:
    """Elements that a rank sends in a ring collective of a full tensor of `numel`."""
    return collective_traffic(f"ring_{name}", numel, ranks).sent[rank]


def formula(
    part: str, backward: bool, ranks: int, rank: int, sliced: bool, key_heads: int
) -> tuple[Calls, int]:
    """The calls of one part, and the elements that a rank sends in them."""
    from .runs_model import BATCH, HEAD_DIM, HIDDEN, sequence_of

    tokens = BATCH * sequence_of(ranks, sliced)
    if part == "loss":  # the largest logit; the sum of exponentials and the label's
        sums = sent("all_reduce", tokens, ranks, rank)
        sums += sent("all_reduce", 2 * tokens, ranks, rank)
        return ({}, 0) if backward else ({"all_reduce": 2}, sums)
    calls = (SLICED if sliced else WHOLE)[part][backward]
    total = 0
    for name, times in calls.items():
        of_norms = sliced and name == "all_reduce"
        numel = HIDDEN if of_norms else tokens * HIDDEN
        total += times * sent(name, numel, ranks, rank)
    if part == "layer" and backward and key_heads < ranks:
        others = ranks // key_heads - 1  # with the same key head
        total += others * 2 * HEAD_DIM * HIDDEN  # gradients of k and v
    return calls, total


def measured(
    ranks: int, sliced: bool, key_heads: int = 12
) -> dict[str, list[tuple[Calls, int]]]:
    """Each part's calls and rank 0's elements, forward and backward.

    EvidenceError unless they are the formula's on every rank.
    """
    from .runs_model import traffic

    found = runs.remembered(traffic, ranks, sliced, key_heads)
    for part, backward in product(PARTS, (False, True)):
        for rank, result in enumerate(found):
            one = result[part]["backward" if backward else "forward"]
            expected = formula(part, backward, ranks, rank, sliced, key_heads)
            if (one["calls"], one["sent"]) != expected:
                raise EvidenceError(
                    f"{part}, backward={backward}, rank {rank} of {ranks}: "
                    f"{one}, formula {expected}"
                )
    return {
        part: [(found[0][part][way]["calls"], found[0][part][way]["sent"])
               for way in ("forward", "backward")]
        for part in PARTS
    }  # fmt: skip


def in_words(calls: Calls) -> str:
    """`2 all-reduce`, or a dash."""
    said = [f"{times} {name.replace('_', '-')}" for name, times in calls.items()]
    return ", ".join(said) or "—"


@REGISTRY
def model_calls(sequence_parallel: bool = False) -> Table:
    """Calls of each part of the model, forward and backward, on 2, 3 and 4 ranks."""
    rows = []
    every = [measured(ranks, sequence_parallel) for ranks in (2, 3, 4)]
    for part in PARTS:
        kinds = [[calls for calls, _ in one[part]] for one in every]
        if kinds.count(kinds[0]) != len(kinds):
            raise EvidenceError(f"{part}: other calls on other numbers of ranks")
        rows.append([part, *map(in_words, kinds[0])])
    return Table(["part", "forward", "backward"], rows)


@REGISTRY
def calls_per_layer() -> Table:
    """Elements that rank 0 sends for one layer, and what the formula's terms are."""
    from .runs_model import BATCH, HIDDEN, sequence_of

    rows = []
    for sliced, ranks in product((False, True), (2, 3, 4)):
        (_, forward), (_, backward) = measured(ranks, sliced)["layer"]
        sequence = sequence_of(ranks, sliced)
        unit = BATCH * sequence * HIDDEN * (ranks - 1)
        norms = 2 * sent("all_reduce", HIDDEN, ranks, 0) if sliced else 0
        rest = forward + backward - norms
        rows.append(
            ["sequence-parallel" if sliced else "tensor-parallel", str(ranks),
             f"{BATCH}, {sequence}, {HIDDEN}", count(forward), count(backward),
             count(norms) if norms else "—", f"{rest * ranks / unit:.3g}"]
        )  # fmt: skip
    header = ["", "$t$", "$b, s, h$", "forward", "backward", "of it norms",
              r"rest, in $bsh\frac{t-1}{t}$"]  # fmt: skip
    return Table(header, rows, "lrrrrrr")
