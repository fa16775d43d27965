"""States of real runs, in bytes, beside what `xtrain.plan` says of them."""

from dataclasses import replace

from xtrain.plan import (
    Layout,
    ModelShape,
    StateMemory,
    device_parameters,
    memory_per_device,
    state_memory,
)

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value
from .runs_memory_cases import CASES, SEQUENCE, SIZES, Case

KINDS = ("weights", "gradients", "optimizer")
PADDED = "the flat weights are padded"
WHY = {
    "ddp": "the last bucket has one number more",
    "zero 1": PADDED,
    "zero 2": PADDED,
    "fsdp": "each unit is padded by itself",
}


def measured(case: Case) -> list[dict[str, int]]:
    """What the run found, by rank."""
    from .runs_memory import bytes_of_cases

    (name,) = (name for name, one in CASES.items() if one == case)
    return [found[name] for found in runs.remembered(bytes_of_cases, case.ranks)]


def predicted(case: Case, rank: int) -> StateMemory:
    """Bytes of states, by `memory_per_device`."""
    held = memory_per_device(
        case.shape,
        case.layout,
        SEQUENCE,
        rank=case.pipeline_rank(rank),
        recipe=case.recipe,
    )
    gradients = held.gradients + held.main_gradients
    optimizer = held.master + held.moments
    return StateMemory(int(held.weights), int(gradients), int(optimizer))


def with_padding(case: Case, rank: int) -> StateMemory:
    """The same to the byte: with what our wrappers put into their flat tensors."""
    plain = predicted(case, rank)
    if case.wrapper == "ddp":
        return replace(plain, gradients=plain.gradients + 4)  # the spare number, fp32
    if case.wrapper == "fsdp":
        return units_together(case, rank)
    if case.wrapper:
        return flat_together(case, rank)
    return plain


def units_together(case: Case, rank: int) -> StateMemory:
    """FSDP: every layer is a unit, and what is left one more; moments have no padding.

    The padding is at the end, so it is the last data rank's.
    """
    layout = case.layout
    held = device_parameters(case.shape, layout, case.pipeline_rank(rank))
    units = [held.block] * (held.dense_layers + held.moe_layers) + [held.root]
    shards = [state_memory(unit, layout.data, 3, case.recipe) for unit in units]
    optimizer = sum(shard.optimizer for shard in shards)
    if data_rank(case, rank) == layout.data - 1:
        padding = sum(-unit % layout.data for unit in units)
        optimizer -= state_memory(padding, 1, 0, case.recipe).optimizer
    return StateMemory(
        sum(shard.weights for shard in shards),
        sum(shard.gradients for shard in shards),
        optimizer,
    )


def flat_together(case: Case, rank: int) -> StateMemory:
    """ZeRO-1 and 2: weights are one flat tensor, padded for the data ranks.

    With experts these are the ranks of "expert_data" alone, also for what is no expert.
    In a pipeline, and over expert ranks, gradients lie in a flat tensor, too.
    """
    layout = case.layout
    own = device_parameters(case.shape, layout, case.pipeline_rank(rank)).total
    ranks = layout.expert_data if layout.expert > 1 else layout.data
    plain = state_memory(own, ranks, layout.zero, case.recipe)
    whole = state_memory(own + -own % ranks, ranks, layout.zero, case.recipe)
    if layout.expert * layout.pipeline > 1:
        return whole
    return replace(plain, weights=whole.weights)


def data_rank(case: Case, rank: int) -> int:
    """Of the axes outermost first, pipeline, data, and the others."""
    inner = case.size("context") * case.size("tensor")
    return rank // inner % case.layout.data


def check_states(case: Case) -> list[dict[str, int]]:
    """What was measured; EvidenceError unless it is predicted to the byte."""
    found = measured(case)
    for rank, one in enumerate(found):
        right = with_padding(case, rank)
        for kind in KINDS:
            if one[kind] != getattr(right, kind):
                raise EvidenceError(
                    f"{case}, rank {rank}: {one[kind]} bytes of {kind}, "
                    f"formula {getattr(right, kind)}"
                )
    return found


def positions(case: Case) -> dict[str, int]:
    """The first rank of each pipeline position, by a name for the table."""
    if case.size("pipeline") == 1:
        return {"": 0}
    half = case.ranks // case.size("pipeline")
    return {", first stage": 0, ", last stage": half}


def why(case: Case, rank: int) -> str:
    """Why a run holds more than the plan says; nothing where it does not."""
    if with_padding(case, rank) == predicted(case, rank):
        return ""
    if case.layout.expert > 1:
        return "our wrapper shards all over `expert_data` alone"
    return WHY[case.wrapper]


@TABLES
def measured_states() -> Table:
    """State bytes of real runs, by what they are, beside the prediction."""
    rows = []
    for name, case in CASES.items():
        found = check_states(case)
        for position, rank in positions(case).items():
            one, plan = found[rank], predicted(case, rank)
            together = sum(one[kind] for kind in KINDS)
            rows.append(
                [name + position, str(case.ranks), *(count(one[k]) for k in KINDS),
                 count(together), count(plan.total), count(together - plan.total),
                 why(case, rank)]
            )  # fmt: skip
    header = ["run", "ranks", *KINDS, "measured", "predicted", "more", "because"]
    return Table(header, rows, "lrrrrrrrl")


@value
def measured_model(what: str) -> int:
    """Parameters of the model of the runs, or of one of its layers."""
    shape = ModelShape(**SIZES)
    if what == "model":
        return shape.parameters
    held = device_parameters(shape, Layout())
    return {"layer": held.block, "root": held.root}[what]
