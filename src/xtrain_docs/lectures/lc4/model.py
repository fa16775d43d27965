"""Tables and the figure of the pages on the whole model and its files."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from xtrain.plan import collective_traffic

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, line, text
from ...tables import REGISTRY as TABLES
from ...tables import Table

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


@TABLES
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


@TABLES
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


# ------------------------------------------------------------------ what a rank reads

WIDTH, LEFT, RIGHT, LANE = 400, 118, 394, 7


@FIGURES
def bytes_of_a_file(ranks: int = 4) -> str:
    """Every tensor of a file as a bar of its bytes, in a lane for each rank."""
    from .runs_model import ranges_read

    found = runs.remembered(ranges_read, ranks)
    parts: list[str] = []
    for rank in range(ranks):
        x = 6 + 96 * rank
        parts += [bar(x, 5, 12, 12, rank), text(x + 18, 15, f"rank {rank}", "xt-tick")]
    y, words = 30.0, []
    for name, shape in found[0]["shapes"].items():
        parts.append(text(LEFT - 8, y + 12, short(name), "xt-tick", "end"))
        size = f"{' × '.join(map(str, shape))}"
        parts.append(text(LEFT - 8, y + 25, size, "xt-tick", "end"))
        for rank, result in enumerate(found):
            top = y + LANE * rank
            parts.append(line(LEFT, top + 3, RIGHT, top + 3, "xt-grid"))
            for low, high in elements(name, shape, result["asked"]):
                scale = (RIGHT - LEFT) / prod(shape)
                at = LEFT + low * scale
                parts.append(bar(at, top, (high - low) * scale - 0.5, LANE - 1, rank))
        y += LANE * ranks + 8
    for rank, result in enumerate(found):
        words.append(f"rank {rank} reads {result['held']} of {result['file']} bytes")
    title = "Which bytes of a file each rank reads"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def short(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`; a norm as it is called."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return {"input_layernorm": "input norm", "post_attention_layernorm": "second norm",
            "norm": "last norm"}.get(layer, layer)  # fmt: skip


def bar(x: float, y: float, width: float, height: float, rank: int) -> str:
    """A filled rectangle in a rank's colour."""
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" '
        f'class="xt-bar-fill xt-s{rank}"/>'
    )


def elements(
    name: str, shape: Sequence[int], asked: Sequence[Sequence]
) -> Iterator[tuple[int, int]]:
    """Ranges of the flattened tensor that the boxes of `name` consist of."""
    for wanted, low, high in asked:
        if wanted != name:
            continue
        if len(shape) == 1:
            yield low[0], high[0]
        elif (low[1], high[1]) == (0, shape[1]):  # whole rows lie side by side
            yield low[0] * shape[1], high[0] * shape[1]
        else:
            for row in range(low[0], high[0]):
                yield row * shape[1] + low[1], row * shape[1] + high[1]


# ---------------------------------------------------------- which slice a rank holds

SCALE, AT = 7, 150  # pixels an element; where the matrices begin


@FIGURES
def slices_of_a_model(ranks: int = 4) -> str:
    """Every weight of a tiny model as a matrix, coloured by the rank that holds it."""
    from .runs_model import slices_held

    found = runs.remembered(slices_held, ranks)
    parts: list[str] = []
    for rank in range(ranks):
        x = 6 + 96 * rank
        parts += [bar(x, 5, 12, 12, rank), text(x + 18, 15, f"rank {rank}", "xt-tick")]
    y, words = 30.0, []
    for name in found[0]:
        *shape, _, _, _ = found[0][name]
        rows, columns = shape if len(shape) == 2 else (1, shape[0])
        owners = [one[name][-2:] for one in found]
        parts.append(text(AT - 10, y + 12, short(name), "xt-tick", "end"))
        for rank, (low, end) in enumerate(owners):
            among = [r for r, held in enumerate(owners) if held == [low, end]]
            parts.append(held_slice(y, (rows, columns), found[rank][name], rank, among))
        distinct = len({tuple(held) for held in owners})
        said = holding(distinct, ranks)
        parts.append(text(AT + columns * SCALE + 10, y + 12, said, "xt-tick"))
        words.append(f"{short(name)}: {said}")
        y += max(rows * SCALE, 14) + 10
    title = "Which slice of each weight a rank holds"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def holding(distinct: int, ranks: int) -> str:
    """How many ranks hold the same."""
    if distinct == ranks:
        return "a slice each"
    return "whole on all" if distinct == 1 else f"{ranks // distinct} hold the same"


def held_slice(
    y: float, size: tuple[int, int], held: Sequence[int], rank: int, among: list[int]
) -> str:
    """A rank's box; of what several hold, each colours its part of the width."""
    *shape, dim, low, end = held
    rows, columns = size
    top, bottom, left, right = 0, rows, 0, columns
    if len(shape) == 1 or dim == 1:
        left, right = low, end
    else:
        top, bottom = low, end
    part = (right - left) * SCALE / len(among)
    return bar(
        AT + left * SCALE + among.index(rank) * part,
        y + top * SCALE,
        part - 1,
        (bottom - top) * SCALE - 1,
        rank,
    )


@TABLES
def bytes_read(ranks: tuple[int, ...] = (1, 2, 4)) -> Table:
    """Bytes of the weights that each rank asks for, holds, and that the file has."""
    from .runs_model import ITEMSIZE_OF_FILE, ranges_read

    rows = []
    for size in ranks:
        found = runs.remembered(ranges_read, size)
        for rank, one in enumerate(found):
            asked = sum(
                prod(high - low for low, high in zip(*box, strict=True))
                for _, *box in one["asked"]
            )
            if asked * ITEMSIZE_OF_FILE != one["held"]:
                raise EvidenceError(f"rank {rank} of {size}: {asked} elements asked")
        whole = sum(map(prod, found[0]["shapes"].values())) * ITEMSIZE_OF_FILE
        rows.append([str(size), count(whole), count(found[0]["held"]),
                     f"{found[0]['held'] / whole:.3g}"])  # fmt: skip
    header = ["ranks", "bytes of weights", "read and held by rank 0", "share"]
    return Table(header, rows, "rrrr")
