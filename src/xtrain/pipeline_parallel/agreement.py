"""What the ranks of a pipeline agree on: before a step, and after it.

    before   is any batch wrong?  have shapes changed since the last step?
    after    the sum and the count of the loss; has any rank failed?

Each is one all-reduce of a few numbers, over the pipeline's ranks and then over the
data ranks; only if something is wrong do they tell each other what.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import check_same, raising_everywhere
from xtrain.comm.checks import message_device, rank_and_size
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.pipeline_parallel.step import NothingArrived
from xtrain.schedules import Schedule, validate


def digest(what: object) -> int:
    """A number of 48 bits for what something prints as."""
    return int(hashlib.sha256(repr(what).encode()).hexdigest()[:12], 16)


def check_stages(
    stages: Sequence[PipelineStage], schedule: Schedule, rank: int, size: int
) -> str | None:
    """What is wrong with this rank's stages; None if nothing is."""
    if size != schedule.ranks:
        return f"the schedule is for {schedule.ranks} ranks, but the group has {size}"
    try:
        validate(schedule)
    except ValueError as error:
        return str(error)
    counts = {stage.count for stage in stages}
    if counts != {schedule.stages}:
        return (
            f"stages are of a model cut into {sorted(counts)}, but {schedule.name} has "
            f"{schedule.stages} virtual stages"
        )
    indices, needed = [stage.index for stage in stages], schedule.stages_of(rank)
    if indices != list(needed):
        return f"rank {rank} has stages {indices}, but needs {list(needed)} in order"
    return None


def check_batch(
    what: str, batch: Any, stage: int, schedule: Schedule, rank: int
) -> str | None:
    """What is wrong with what this rank brings for a stage; None if nothing is."""
    m = schedule.micro_batches
    needed = any(schedule.rank_of(stage, i) == rank for i in range(m))
    if batch is None:
        missing = f"rank {rank} holds stage {stage} and needs {what}, but has None"
        return missing if needed else None
    tensors = [batch] if isinstance(batch, Tensor) else batch
    if not isinstance(tensors, Sequence) or not tensors:
        return f"{what} are {type(batch).__name__}, not a tensor or several"
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            return f"{what} hold {tensor!r:.50}, not a tensor with rows"
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) > 1:
        return f"{what} have {sorted(rows)} rows: all must have as many"
    if rows.pop() < m:
        return (
            f"{what} have {tensors[0].shape[0]} rows, fewer than the {m} micro-batches "
            "they are cut into"
        )
    return None


def agree_on_stages(
    problem: str | None,
    schedule: Schedule,
    group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> None:
    """Let all ranks go on, or none.

    Raises:
        ValueError: on every rank: one has a problem, schedules differ, or data ranks do
            not have the same stages.
    """
    known = {"schedule": digest(schedule)}
    if data_group is None:
        check_same("stages", [], group, known, problem)
        return
    with raising_everywhere(ValueError, group=group):
        with raising_everywhere(ValueError, group=data_group):
            check_same("stages", [], group, known, problem)
        known["rank in the pipeline"] = rank_and_size(group)[0]
        check_same("data ranks", [], data_group, known)


def agree_to_begin(
    problem: str | None,
    signature: int,
    group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> int:
    """A number for what all ranks' `signature`s say together.

    Raises:
        ValueError: on every rank, if one has a problem.
    """
    numbers = torch.tensor([int(problem is not None), signature])
    numbers = numbers.to(message_device(group))
    dist.all_reduce(numbers, group=group)
    problems = numbers[:1].clone()
    if data_group is not None:
        dist.all_reduce(problems, group=data_group)
    if problems.item():
        error = None if problem is None else ValueError(problem)
        raise_together(error, group, data_group)
    return int(numbers[1].item())


def sums_of_all(
    total: Tensor | float,
    count: Tensor | int,
    failure: Exception | None,
    group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """The sum and the count of the loss of all ranks, float64.

    Raises:
        ValueError, RuntimeError: on every rank, if one has failed.
    """
    device = message_device(group)
    numbers = torch.zeros(3, dtype=torch.float64, device=device)
    numbers[0], numbers[1], numbers[2] = total, count, int(failure is not None)
    for one in (group,) if data_group is None else (group, data_group):
        dist.all_reduce(numbers, group=one)
    if numbers[2].item():
        raise_together(failure, group, data_group)
    return numbers[0], numbers[1]


def raise_together(
    error: Exception | None, group: ProcessGroup | None, data_group: ProcessGroup | None
) -> NoReturn:
    """Raise on every rank what some of them have; all call it, with theirs or None."""
    if isinstance(error, NothingArrived):
        error = None
    errors = ValueError, RuntimeError
    if data_group is None:
        with raising_everywhere(*errors, group=group):
            _raise(error)
    else:
        with (
            raising_everywhere(*errors, group=data_group),
            raising_everywhere(*errors, group=group),
        ):
            _raise(error)
    raise AssertionError("unreachable: some rank has an error")


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
