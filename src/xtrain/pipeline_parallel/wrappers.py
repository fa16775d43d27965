"""What may sum the gradients of stages over data ranks, and what may not.

    stage.module = DistributedDataParallel(stage.module, ...)    or FSDP
    stage.reduction = ZeroOptimizer(...)                         of one stage or several

The runner runs every backward inside `no_sync()`, and calls `reduce_gradients()` when a
stage has its last gradient. What has not both of them would reduce the gradients of
every micro-batch, or of none. The runner divides by the count of the whole batch of all
data ranks, so gradients have to be summed over these ranks, and not averaged.

Each check speaks of this rank alone.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world
from xtrain.pipeline_parallel.stage import PipelineStage

SIGNS = ("no_sync", "set_requires_gradient_sync", "reduce_gradients")
"""Methods that modules have which reduce gradients: ours, and torch's two kinds."""


def check_wrappers(
    stages: Sequence[PipelineStage], data_group: ProcessGroup | None
) -> str | None:
    """What is wrong with how this rank's stages are reduced; None if nothing is."""
    for stage in stages:
        problem = (
            check_reduction(stage.reduction, data_group)
            or check_inside(stage)
            or check_shared(stage)
        )
        if problem is not None:
            return f"stage {stage.index}: {problem}"
    return None


def check_reduction(reduction: Any, data_group: ProcessGroup | None) -> str | None:
    """Whether it can reduce when the runner asks, and over which ranks it sums."""
    if reduction is None:
        return None
    name = type(reduction).__name__
    for method in ("no_sync", "reduce_gradients"):
        if not hasattr(reduction, method):
            return (
                f"{name} has no {method}(), so it cannot wait for the last backward of "
                "a step: use DistributedDataParallel, FullyShardedDataParallel or "
                "ZeroOptimizer of xtrain"
            )
    if not hasattr(reduction, "process_group"):
        return None  # not one of ours: whoever wrote it knows
    over = dist.get_process_group_ranks(group_or_world(reduction.process_group))
    data = [dist.get_rank()]
    if data_group is not None:
        data = dist.get_process_group_ranks(data_group)
    if over != data:
        given = "no data_group" if data_group is None else f"data_group {data}"
        return (
            f"{name} sums gradients over ranks {over}, but the runner has {given}: it "
            "needs the same ranks to take the loss and the count over all of them"
        )
    kind = getattr(reduction, "gradient_reduction", "sum")
    if kind != "sum" and len(over) > 1:
        return (
            f"{name} has gradient_reduction={kind!r}: gradients are divided by the "
            'count of all data ranks already, so it must be "sum"'
        )
    return None


def check_inside(stage: PipelineStage) -> str | None:
    """Whether there is anything else that would reduce in every backward."""
    for part in stage.module.modules():
        if part is not stage.reduction and any(hasattr(part, name) for name in SIGNS):
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            return (
                f"{kind} would reduce gradients in every backward: only what is around "
                "the whole module, and has no_sync() and reduce_gradients(), can wait "
                "for the last one"
            )
    return None


def check_shared(stage: PipelineStage) -> str | None:
    """Whether the stage still has what it shares, whole."""
    held = {id(parameter) for parameter in stage.parameters()}
    for name, parameter in stage.shared.items():
        sharded = getattr(parameter, "_gradients_reduced_by", "")
        if id(parameter) not in held or sharded == "FullyShardedDataParallel":
            return (
                f"it shares {name!r} with other stages, but its wrapper holds a shard "
                "of that, cut elsewhere than theirs: untie it, or use "
                "DistributedDataParallel or ZeroOptimizer"
            )
    return None


def reduces_shards(reduction: Any) -> bool:
    """Whether it cuts whole gradients into shards of its own, as ZeRO 1 and 2 do."""
    return reduction is not None and not isinstance(reduction, nn.Module)
