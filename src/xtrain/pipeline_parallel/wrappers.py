"""Which wrappers may sum the gradients of stages over data ranks.

    stage.module = DistributedDataParallel(stage.module, ...)    or FSDP
    stage.reduction = ZeroOptimizer(...)                         of one stage or several
    torch's DistributedDataParallel, or fully_shard              see `torch_wrappers`

A module that knows its mesh needs a data group of all ranks that bring other batches.
Its wrapper may be over fewer of them, as experts differ on the ranks of one axis: then
the caller sums over the others after the step, by `sync_gradients`.

The runner runs every backward inside `no_sync()`, and calls `reduce_gradients()` when a
stage has its last gradient. A wrapper without these methods would reduce the gradients
of every micro-batch, or of none. The runner divides by the count of the whole batch of
all data ranks, so wrappers have to sum over these ranks; torch's average, which
`torch_wrappers` undoes.

Each check is of this rank alone.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world
from xtrain.comm.mesh import BATCH_AXES, axes_of_ranks, mesh_of, shorten, sizes_of
from xtrain.comm.wrapper_rules import owner_of
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.pipeline_parallel.torch_wrappers import (
    SHARDED,
    TorchFSDP,
    TorchWrapper,
)

SIGNS = ("no_sync", SHARDED, "reduce_gradients")
"""Methods that modules have which reduce gradients: ours, and torch's two kinds."""


def check_wrappers(
    stages: Sequence[PipelineStage], data_group: ProcessGroup | None
) -> str | None:
    """What is wrong with how this rank's stages are reduced; None if nothing is."""
    for stage in stages:
        problem = (
            check_on_mesh(stage, data_group)
            or check_reduction(stage, data_group)
            or check_inside(stage)
            or check_shared(stage)
        )
        if problem is not None:
            return f"stage {stage.index}: {problem}"
    return None


def check_on_mesh(stage: PipelineStage, data_group: ProcessGroup | None) -> str | None:
    """Whether all ranks that bring batches, by the mesh, are in the data group."""
    try:
        mesh = mesh_of(stage.module)
    except ValueError as error:
        return str(error)
    if mesh is None:
        return None
    needed = [axis for axis in BATCH_AXES if sizes_of(mesh).get(axis, 1) > 1]
    ranks = ranks_of(data_group)
    along = axes_of_ranks(mesh, ranks)
    if along is not None and set(along) == set(needed):
        return None
    given = "no data_group" if data_group is None else f"data_group {shorten(ranks)}"
    return (
        f"{given}, but on this mesh ranks of {', '.join(needed) or 'no axis'} bring "
        "other batches, and loss and count are of all: data_group=batch_group(mesh)"
    )


def check_reduction(
    stage: PipelineStage, data_group: ProcessGroup | None
) -> str | None:
    """Whether it can reduce when the runner asks, and over which ranks it sums."""
    reduction = stage.reduction
    if reduction is None:
        return None
    name = type(reduction).__name__
    if isinstance(reduction, TorchWrapper) and (problem := reduction.problem()):
        return f"{name}: {problem}"
    for method in ("no_sync", "reduce_gradients"):
        if not hasattr(reduction, method):
            return (
                f"{name} has no {method}(), which the runner needs to reduce once a "
                "step: use DistributedDataParallel, FullyShardedDataParallel or "
                "ZeroOptimizer of xtrain"
            )
    if not hasattr(reduction, "process_group"):
        return None  # written by the user, who chose its ranks
    over = dist.get_process_group_ranks(group_or_world(reduction.process_group))
    data = ranks_of(data_group)
    if mesh_of(stage.module) is not None and not isinstance(reduction, TorchWrapper):
        return None  # checked when it was made; the data group above
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


def ranks_of(data_group: ProcessGroup | None) -> list[int]:
    """The global ranks of a data group; without one this rank alone."""
    if data_group is None:
        return [dist.get_rank()]
    return dist.get_process_group_ranks(data_group)


def check_inside(stage: PipelineStage) -> str | None:
    """Whether there is anything else that would reduce in every backward."""
    shards = isinstance(stage.reduction, TorchFSDP)
    around = {stage.reduction, getattr(stage.reduction, "module", None)}
    for part in stage.module.modules():
        if part in around or (shards and hasattr(part, SHARDED)):
            continue
        if any(hasattr(part, name) for name in SIGNS):
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
        sharded = owner_of(parameter) == "FullyShardedDataParallel"
        if id(parameter) not in held or sharded:
            return (
                f"it shares {name!r} with other stages, but its wrapper holds a shard "
                "of that, cut elsewhere than theirs: untie it, or use "
                "DistributedDataParallel or ZeroOptimizer"
            )
    return None
