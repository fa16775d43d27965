"""Tables of the lc4 pages on single modules: what each sends and what it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xtrain.plan import ModelShape, activation_memory, collective_traffic

from ... import runs, values
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table

RING = {
    "all-reduce": "ring_all_reduce",
    "all-gather": "ring_all_gather",
    "reduce-scatter": "ring_reduce_scatter",
}
FACTORS = {
    "all-reduce": "2\\,\\frac{N-1}{N}",
    "all-gather": "\\frac{N-1}{N}",
    "reduce-scatter": "\\frac{N-1}{N}",
}
RECORDED = {
    "allreduce": "all-reduce",
    "allgather_base": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "send": "send",
}


@dataclass(frozen=True)
class Call:
    """A collective that a module should run: when, and the size of its whole tensor."""

    phase: str
    op: str
    size: str


def forward(op: str, size: str) -> Call:
    return Call("forward", op, size)


def backward(op: str, size: str) -> Call:
    return Call("backward", op, size)


CUT = (forward("all-reduce", "bsh"), backward("all-reduce", "bsh"))
SLICED = (
    forward("all-gather", "bsh"),
    forward("reduce-scatter", "bsh"),
    backward("all-gather", "bsh"),
    backward("all-gather", "bsh"),
    backward("reduce-scatter", "bsh"),
)
FORMULAS: dict[str, tuple[Call, ...]] = {
    "attention": CUT,
    "attention sp": SLICED,
    "swiglu": CUT,
    "swiglu sp": SLICED,
    "column only": (
        forward("all-gather", "bsf"),
        forward("all-gather", "bsh"),
        backward("all-reduce", "bsf"),
        backward("all-reduce", "bsh"),
    ),
    "norm": (),
    "norm sp": (backward("all-reduce", "h"),),
    "vocabulary": (forward("all-reduce", "bsh"),),
    "vocabulary sp": (forward("reduce-scatter", "bsh"), backward("all-gather", "bsh")),
    "hidden": (forward("all-gather", "bsh"),),
    "loss": (forward("all-reduce", "T"), forward("all-reduce", "2T")),
    "gathered loss": (forward("all-gather", "TV"),),
}
NAMES = {
    "attention": "attention",
    "attention sp": "attention, sequence-parallel",
    "swiglu": "SwiGLU, column then row",
    "swiglu sp": "SwiGLU, sequence-parallel",
    "column only": "two column layers that gather",
    "norm": "RMSNorm",
    "norm sp": "RMSNorm, sequence-parallel",
    "vocabulary": "embedding by vocabulary",
    "vocabulary sp": "by vocabulary, sequence-parallel",
    "hidden": "embedding by hidden size",
    "loss": "vocabulary-parallel loss",
    "gathered loss": "loss of gathered logits",
}


def elements(size: str) -> int:
    """Of the tensor of one call in the runs."""
    from .runs_modules import BATCH, HIDDEN, INNER, SEQUENCE, TOKENS, VOCABULARY

    tokens = BATCH * SEQUENCE
    return {
        "bsh": tokens * HIDDEN,
        "bsf": tokens * INNER,
        "h": HIDDEN,
        "T": TOKENS,
        "2T": 2 * TOKENS,
        "TV": TOKENS * VOCABULARY,
    }[size]


def sent(call: Call, ranks: int, rank: int) -> int:
    """Bytes by the formula of a ring."""
    numel = elements(call.size)
    if call.size == "h":  # small: this backend sends it straight to every other rank
        return (ranks - 1) * numel * runs.ITEMSIZE
    traffic = collective_traffic(RING[call.op], numel, ranks)
    return traffic.bytes(runs.ITEMSIZE).sent[rank]


def measured(module: str, ranks: int) -> list[list[Any]]:
    """Rank 0's calls, [phase, call, tensor, sent]; EvidenceError unless the formula."""
    from .runs_modules import calls as run

    found = runs.remembered(run, ranks, module)
    for rank, of_rank in enumerate(found):
        actual = [[phase, RECORDED[op], out] for phase, op, _, out in of_rank]
        formula = [[c.phase, c.op, sent(c, ranks, rank)] for c in FORMULAS[module]]
        if actual != formula:
            raise EvidenceError(
                f"{module}, rank {rank} of {ranks}: {actual}, formula {formula}"
            )
    return found[0]


@REGISTRY
def module_calls(module: str = "swiglu", ranks: int = 4) -> Table:
    """The collectives of one forward and backward of a module, one row each."""
    found = measured(module, ranks)
    rows = []
    for call, (phase, _, _, out) in zip(FORMULAS[module], found, strict=True):
        rows.append([phase, call.op, f"${call.size}$",
                     f"${FACTORS[call.op]}\\,{call.size}$", count(out)])  # fmt: skip
    header = ["when", "call", "tensor", "elements sent", "bytes, measured"]
    return Table(header, rows, "lllrr")


@REGISTRY
def module_bytes(modules: str = "swiglu,column only") -> Table:
    """Bytes that a rank sends, forward and backward, on 2, 3 and 4 ranks."""
    rows = []
    for module in modules.split(","):
        cells = []
        for ranks in (2, 3, 4):
            found = measured(module, ranks)
            for phase in ("forward", "backward"):
                total = sum(call[3] for call in found if call[0] == phase)
                cells.append(count(total) if total else "-")
        rows.append([NAMES[module], *cells])
    header = ["", *(f"{n} ranks, {p}" for n in (2, 3, 4) for p in ("fwd", "bwd"))]
    return Table(header, rows, "l" + "r" * 6)


# ---------------------------------------------------------------- grouped heads


@REGISTRY
def gqa_gradients(heads: int = 8, key_heads: int = 2, ranks: int = 4) -> Table:
    """Shares of a key head's gradient by rank, before and after the replicas' sum."""
    from .runs_modules import heads_held, shares_of_key_gradient

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


@REGISTRY
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


# ---------------------------------------------------------------- the loss


def loss_bytes(gathered: bool, tokens: int, vocabulary: int, ranks: int) -> int:
    """What the loss of fp32 logits keeps for backward: see the page."""
    if gathered:  # log-probabilities, labels, and a sum of weights
        return 4 * tokens * vocabulary + 8 * tokens + 4
    # probabilities, label's column, two masks, log-sum-exp, and the number of labels
    return 4 * tokens * vocabulary // ranks + (8 + 1 + 1 + 4) * tokens + 8


@REGISTRY
def loss_memory(tokens: int = 96, vocabulary: int = 4800) -> Table:
    """Bytes kept for backward by the parallel loss and by one of gathered logits."""
    from .runs_activations import kept_by_loss

    rows = []
    for ranks in (1, 2, 3, 4):
        cells = []
        for gathered in (True, False):
            formula = loss_bytes(gathered, tokens, vocabulary, ranks)
            for found in runs.remembered(
                kept_by_loss, ranks, gathered, tokens, vocabulary
            ):
                if found["bytes"] != formula or found["in place"] is gathered:
                    raise EvidenceError(f"gathered={gathered}: {found}, not {formula}")
            cells.append(formula)
        rows.append([str(ranks), *map(count, cells), f"{cells[0] / cells[1]:.2f}"])
    header = ["ranks", "gathered logits", "vocabulary-parallel", "ratio"]
    return Table(header, rows, "rrrr")


@REGISTRY
def large_logits(ranks: int = 4) -> Table:
    """The loss of small and large logits; EvidenceError unless ours is right."""
    from .runs_modules import big_logits

    rows = []
    for scale in (1, 60):
        for first in (False, True):
            found = runs.remembered(big_logits, ranks, scale, first)
            for right, ours, _ in found:
                if abs(right - ours) > 1e-6 * right:
                    raise EvidenceError(f"x{scale}: {ours}, in one process {right}")
            right, ours, naive = found[0]
            where = "all in rank 0's part" if first else "anywhere"
            numbers = (f"{number:.4f}" for number in (right, ours, naive))
            rows.append([f"times {scale}", where, *numbers])
    header = ["logits", "labels", "one process", "ours", "without the maximum"]
    return Table(header, rows, "llrrr")


# ---------------------------------------------------------------- activations


def classic_bytes(ranks: int, split: bool, **sizes: int) -> int:
    """Bytes per layer of the formula, and two 16-bit numbers a token of each norm."""
    b, s, h, a = sizes.values()
    norms = 8 * s * b // (ranks if split else 1)
    return int(activation_memory(s, b, h, a, ranks, split)) + norms


def our_bytes(ranks: int, split: bool, **sizes: int) -> int:
    """Bytes of a layer of `XtrainModel` in bf16 on a CPU, eager: see the page."""
    from .runs_activations import INNER, KEY_HEADS

    b, s, h, a = sizes.values()
    tokens = s * b
    norms = tokens * (20 * h + 8)
    cut = tokens * (6 * h + 4 * h * KEY_HEADS // a + 8 * INNER + 4 * a)
    angles = 4 * s * h // a
    return (norms // ranks if split else norms) + cut // ranks + angles


@REGISTRY
def layer_memory(layer: str = "classic") -> Table:
    """Bytes that a layer keeps on a rank, tensor-parallel and sequence-parallel."""
    from .runs_activations import SIZES, kept_by_classic_layer, kept_by_our_layer

    run, formula = {
        "classic": (kept_by_classic_layer, classic_bytes),
        "ours": (kept_by_our_layer, our_bytes),
    }[layer]
    rows = []
    for ranks in (1, 2, 4):
        cells = []
        for split in (False, True):
            expected = formula(ranks, split, **SIZES)
            found = runs.remembered(run, ranks, split)
            if set(found) != {expected}:
                raise EvidenceError(
                    f"{layer}, {ranks} ranks, split={split}: {found}, not {expected}"
                )
            cells.append(expected)
        rows.append([str(ranks), *map(count, cells), f"{cells[0] / cells[1]:.2f}"])
    header = ["ranks", "tensor-parallel", "and sequence-parallel", "ratio"]
    return Table(header, rows, "rrrr")


@REGISTRY
def modern_layers(sequence: int = 8192, ranks: int = 8) -> Table:
    """Computed: what a fused layer of known models keeps, bf16, FlashAttention."""
    rows = []
    for name in ("llama-3-8b", "llama-3-70b", "llama-3.1-405b"):
        shape = ModelShape.preset(name)
        h, f = shape.hidden_size, shape.intermediate_size
        share = shape.num_key_value_heads / shape.num_attention_heads
        norms, rest = (
            8 * h,
            4 * h + 4 * h * share + 6 * f + 4 * shape.num_attention_heads,
        )
        sizes = [norms + rest, norms + rest / ranks, (norms + rest) / ranks]
        rows.append([name, *(values.bytes_(sequence * size) for size in sizes)])
    header = ["one sequence, one layer", "whole", f"tensor-parallel, {ranks} ranks",
              "and sequence-parallel"]  # fmt: skip
    return Table(header, rows, "lrrr")
