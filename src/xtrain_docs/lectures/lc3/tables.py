"""Tables of the lc3 pages: bytes held and bytes sent by each stage."""

from xtrain.plan import Recipe, StateMemory, collective_traffic, state_memory

from ... import runs
from ...evidence import PHI, WORLD_SIZES, EvidenceError, average_in_units, count
from ...tables import REGISTRY, Table

STAGES = ("0", "1", "2", "3")
KINDS = ("weights", "gradients", "optimizer")


def recipe_of(stage: int, bf16: bool) -> str | Recipe:
    """What our code keeps per parameter in a stage, when backward has ended."""
    if not bf16 or stage == 3:
        return "fp32"  # stage 3 has float32 shards and nothing else
    if stage in (0, 2):  # reduced in float32, and the shard is added up in it
        return "megatron18"
    return "zero16"


def bytes_held(stage: str, ranks: int, bf16: bool = False) -> tuple[StateMemory, dict]:
    """Formula and measured bytes of a rank; EvidenceError unless equal on all."""
    from .runs import bytes_held as run
    from .runs_training import parameters_of_tower

    number = int(stage)
    formula = state_memory(
        parameters_of_tower(), ranks, number, recipe_of(number, bf16)
    )
    found = runs.remembered(run, ranks, stage, bf16)
    for rank, result in enumerate(found):
        expected = {kind: getattr(formula, kind) for kind in KINDS}
        if result != expected:
            raise EvidenceError(
                f"stage {stage}, rank {rank} of {ranks}: {result}, formula {expected}"
            )
    return formula, found[0]


@REGISTRY
def zero_bytes(ranks: int = 4, bf16: bool = False) -> Table:
    """Measured bytes of a rank by stage, each equal to the formula."""
    from .runs_training import parameters_of_tower

    phi = parameters_of_tower()
    rows = []
    for stage in STAGES:
        formula, found = bytes_held(stage, ranks, bf16)
        total = sum(found.values())
        rows.append([stage, *(count(found[kind]) for kind in KINDS), count(total),
                     count(formula.total), f"{total / phi:g}"])  # fmt: skip
    header = ["stage", "weights", "gradients", "optimizer", "together", "formula",
              "per parameter"]  # fmt: skip
    return Table(header, rows, "lrrrrrr")


PHIS = {"0": 2, "1": 2, "2": 2, "3": 3, "3 kept": 2}
WORDS = {
    "0": "plain data parallelism", "1": "stage 1", "2": "stage 2", "3": "stage 3",
    "3 kept": "stage 3, weights kept after forward",
}  # fmt: skip


def payload(stage: str, ranks: int) -> int:
    """Bytes a rank sends in a step, over our ring; EvidenceError unless the formula."""
    from .runs import traffic
    from .runs_training import LAYERS, WIDTH, parameters_of_tower

    found = [r["sent"] for r in runs.remembered(traffic, ranks, stage, "ring", WIDTH)]
    phi = parameters_of_tower()
    if stage == "0":  # one element more: the flag in the last bucket
        once = collective_traffic("ring_all_reduce", phi + 1, ranks)
        formula = list(once.bytes(runs.ITEMSIZE).sent)
    else:
        layers = LAYERS if stage.startswith("3") else 1  # each padded by itself
        shard = -(-(phi // layers) // ranks) * layers * runs.ITEMSIZE
        each = PHIS[stage] * (ranks - 1) * shard
        formula = [each] * ranks
    if found != formula:
        raise EvidenceError(f"stage {stage}: sent {found}, formula {formula}")
    return max(found)


@REGISTRY
def zero_payload() -> Table:
    """Payload of a step by stage, for 2, 3, 4 and 8 ranks, equal to the formula."""
    from .runs_training import parameters_of_tower

    phi = parameters_of_tower() * runs.ITEMSIZE
    rows = []
    for stage, words in WORDS.items():
        sent = [payload(stage, ranks) for ranks in WORLD_SIZES]
        share = sent[-1] / (phi * (WORLD_SIZES[-1] - 1) / WORLD_SIZES[-1])
        rows.append([words, f"${round(share, 2):g}\\,\\frac{{N-1}}{{N}}\\Phi$",
                     *map(count, sent)])  # fmt: skip
    header = ["", "that is", *(f"{n} ranks" for n in WORLD_SIZES)]
    return Table(header, rows, "ll" + "r" * len(WORLD_SIZES))


@REGISTRY
def zero_wire(ranks: int = 4, width: int = 256) -> Table:
    """Wire bytes of a step by stage: over our ring and over gloo's collectives."""
    from .runs import traffic
    from .runs_training import parameters_of_tower

    phi = parameters_of_tower(width) * runs.ITEMSIZE
    rows = []
    for stage, words in WORDS.items():
        ours = runs.remembered(traffic, ranks, stage, "ring", width)
        gloo = runs.remembered(traffic, ranks, stage, "torch", width)
        columns = ([r["sent"] for r in ours], [r["wire"] for r in ours],
                   [r["wire"] for r in gloo])  # fmt: skip
        rows.append([words, *(average_in_units(c, phi, PHI) for c in columns)])
    header = ["", "ring, payload", "ring, on the wire", "gloo's own, on the wire"]
    return Table(header, rows, "lrrr")


@REGISTRY
def zero_calls(ranks: int = 2) -> Table:
    """The collectives of a step by stage."""
    from .runs import traffic
    from .runs_training import WIDTH

    rows = []
    for stage, words in WORDS.items():
        calls = runs.remembered(traffic, ranks, stage, "torch", WIDTH)[0]["calls"]
        kinds = {"all-reduce": "allreduce", "all-gather": "allgather",
                 "reduce-scatter": "reduce_scatter"}  # fmt: skip
        numbers = [
            sum(n for op, n in calls.items() if op.startswith((key, f"_{key}")))
            for key in kinds.values()
        ]
        rows.append([words, *(str(n) if n else "-" for n in numbers)])
    header = ["", *(f"{kind}s" for kind in kinds)]
    return Table(header, rows, "lrrr")
