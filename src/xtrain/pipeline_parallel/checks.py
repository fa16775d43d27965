"""What is wrong with what a rank brings: stages, a schedule, a batch.

`check_pipeline` raises on every rank. Each of the others returns a problem in words, or
None; one rank's problem is an error on all of them.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import check_same, digest, raising_everywhere
from xtrain.comm.autocast import autocast_dtype
from xtrain.comm.checks import rank_and_size
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.pipeline_parallel.wrappers import check_wrappers
from xtrain.schedules import Schedule, validate
from xtrain.schedules.action import COMPUTE


def check_pipeline(
    stages: Sequence[Any],
    schedule: Any,
    loss_fn: Any,
    group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> None:
    """What a runner is made of.

    Raises:
        ValueError: on every rank: one has a problem, schedules differ, or data ranks do
            not have the same stages.
    """
    given = {"data_group": data_group is not None}
    check_same("stages", [], group, given, check_data_group(data_group))
    rank, size = rank_and_size(group)
    problem = (
        check_schedule(schedule, size)
        or check_stages(stages, schedule, rank, loss_fn)
        or check_wrappers(stages, data_group)
    )
    known: dict[str, object] = {"schedule": named(schedule)}
    if data_group is None:
        check_same_pipeline(schedule, group, known, problem)
        return
    with raising_everywhere(ValueError, group=group):
        with raising_everywhere(ValueError, group=data_group):
            check_same_pipeline(schedule, group, known, problem)
        known["rank in the pipeline"] = rank
        check_same("data ranks", [], data_group, known)


def check_same_pipeline(
    schedule: Any,
    group: ProcessGroup | None,
    known: dict[str, object],
    problem: str | None,
) -> None:
    """`check_same`, and that the schedule can be run: of one that all share, rank 0
    finds out; where something is wrong, each rank tells of its own."""
    looks = rank_and_size(group)[0] == 0
    with suppress(ValueError):
        found = problem or (check_order(schedule) if looks else None)
        check_same("stages", [], group, known, found)
        return
    check_same("stages", [], group, known, problem or check_order(schedule))


def check_schedule(schedule: Any, size: int) -> str | None:
    """Is it one for so many ranks, of computations only?"""
    if not isinstance(schedule, Schedule):
        return f"the schedule is {type(schedule).__name__}, not a Schedule"
    if size != schedule.ranks or size != len(schedule.actions):
        return f"the schedule is for {schedule.ranks} ranks, but the group has {size}"
    for action in (action for order in schedule.actions for action in order):
        if action.kind not in COMPUTE:
            return (
                f"{schedule.name} has {action}: a schedule for the runner is "
                "computations only, and the runner adds messages and reductions"
            )
    return None


def check_order(schedule: Schedule) -> str | None:
    """Is it whole, and in an order that can be run?"""
    try:
        validate(schedule)
    except ValueError as error:
        return str(error)
    return None


def check_stages(
    stages: Sequence[Any], schedule: Schedule, rank: int, loss_fn: Any
) -> str | None:
    """Are they the schedule's for this rank, in order?"""
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            return f"stages hold {type(stage).__name__}, not PipelineStage"
    if not callable(loss_fn):
        return f"loss_fn is {type(loss_fn).__name__}, not a function"
    counts = {stage.count for stage in stages} - {schedule.stages}
    if counts:
        return (
            f"stages are of a model cut into {sorted(counts)}, but {schedule.name} has "
            f"{schedule.stages} virtual stages"
        )
    indices, needed = [stage.index for stage in stages], schedule.stages_of(rank)
    if indices != list(needed):
        return f"rank {rank} has stages {indices}, but needs {list(needed)} in order"
    return None


def check_data_group(data_group: ProcessGroup | None) -> str | None:
    """Is this rank in the group of its data ranks?"""
    if data_group is None or (
        isinstance(data_group, ProcessGroup) and data_group.rank() >= 0
    ):
        return None
    return f"global rank {dist.get_rank()} is not a member of its data_group"


def named(schedule: Any) -> str:
    """A schedule in a few words that differ if its order does."""
    if not isinstance(schedule, Schedule):
        return type(schedule).__name__
    return (
        f"{schedule.name} of {schedule.ranks} ranks and {schedule.micro_batches} "
        f"micro-batches (order {digest(schedule):012x})"
    )


def needs_stage(schedule: Schedule, stage: int, rank: int) -> bool:
    """Whether any micro-batch is in this stage on this rank."""
    return any(
        schedule.rank_of(stage, i) == rank for i in range(schedule.micro_batches)
    )


def check_batch(what: str, batch: Any, micro_batches: int) -> str | None:
    """Can the batch that this rank needs be cut along dimension 0?"""
    if batch is None:
        return f"this rank needs {what}, but has None"
    tensors = [batch] if isinstance(batch, Tensor) else batch
    if not isinstance(tensors, tuple | list):
        return f"{what} are {type(batch).__name__}, not a tensor or a tuple of tensors"
    if not tensors:
        return f"{what} are an empty {type(batch).__name__}"
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return f"{what} hold {type(tensor).__name__}, not tensors only"
        if tensor.dim() == 0:
            return f"{what} hold a tensor of 0 dimensions, which has no rows to cut"
        if tensor.requires_grad:
            return (
                f"{what} require a gradient, but none is sent back to the caller: put "
                "what computes them into stage 0, or detach them"
            )
    rows = sorted({tensor.shape[0] for tensor in tensors})
    if len(rows) > 1:
        return f"{what} have {rows} rows: all must have as many"
    if rows[0] < micro_batches:
        return (
            f"{what} have {rows[0]} rows, fewer than the {micro_batches} micro-batches "
            "they are cut into"
        )
    return None


def rows_of(batch: Any) -> int:
    """How many rows a checked batch has."""
    return (batch if isinstance(batch, Tensor) else batch[0]).shape[0]


def check_mode(device: str) -> str | None:
    """Can a backward be done here?"""
    if torch.is_inference_mode_enabled():
        return "a step inside torch.inference_mode() computes no gradients"
    if autocast_dtype(device) == torch.float16:
        return (
            "a pipeline under autocast to torch.float16 would need a GradScaler that "
            "asks all ranks, and torch's lets each rank skip a step alone; use "
            "torch.autocast(..., dtype=torch.bfloat16)"
        )
    return None


def device_of(stages: Sequence[PipelineStage]) -> torch.device:
    """Where the stages' parameters are; torch's default device if there are none."""
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            return tensor.device
    return torch.get_default_device()
