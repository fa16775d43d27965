"""What the ranks of a pipeline agree on, before and after a step.

    before   is any batch wrong?  have shapes changed since the last step?
    after    the sum and the count of the loss; has any rank failed?

Each is a few numbers of every rank, which rank 0 gathers and sends to all: point to
point, so that a rank which does not answer can be named. Then data ranks do the same.
If something is wrong, the ranks exchange it in words.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import raising_everywhere
from xtrain.comm.checks import group_or_world, message_device
from xtrain.pipeline_parallel.loss import has_value
from xtrain.pipeline_parallel.lost_ranks import exchange_by_peer


class NothingArrived(Exception):
    """The rank that should have sent has failed and sends its reason."""


class NotReduced(RuntimeError):
    """Gradients could not be summed over data ranks: perhaps one of them had failed."""


def agree_to_begin(
    problem: str | None,
    rows: Sequence[int],
    signature: int,
    group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> tuple[float, ...]:
    """The `signature`s of all ranks.

    Args:
        problem: what is wrong on this rank.
        rows: of the inputs and of the targets that this rank needs.
        signature: of all that decides on the shapes of messages.

    Raises:
        ValueError: on every rank, if one has a problem, or rows differ.
    """
    least, most = min(rows, default=torch.inf), max(rows, default=-torch.inf)
    mine = [float(problem is not None), least, most, float(signature)]
    everyone = of_all_ranks(mine, group, "the beginning of a step")
    least, most = everyone[:, 1].min().item(), everyone[:, 2].max().item()
    differ = "" if least >= most else (
        f"inputs and targets have {least:g} to {most:g} rows: all must have as many"
    )  # fmt: skip
    wrong = everyone[:, 0].any().item() or bool(differ)
    if data_group is not None:
        at = "the beginning of a step of data ranks"
        wrong = of_all_ranks([float(wrong)], data_group, at).any().item()
    if wrong:
        text = problem or differ
        raise_together(ValueError(text) if text else None, group, data_group)
    return tuple(everyone[:, 3].tolist())


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
    lesser = isinstance(failure, NotReduced)
    sum_and_count = [float(n) if has_value(n) else math.nan for n in (total, count)]
    numbers = [*sum_and_count, float(failure is not None), float(lesser)]
    sums = of_all_ranks(numbers, group, "the end of a step").sum(0)
    if data_group is not None:
        at = "the end of a step of data ranks"
        sums = of_all_ranks(sums.tolist(), data_group, at).sum(0)
    if sums[2].item():
        if lesser and sums[2] > sums[3]:
            failure = None  # another rank gives the reason
        raise_together(failure, group, data_group)
    return sums[0], sums[1]


def of_all_ranks(mine: Sequence[float], group: ProcessGroup | None, at: str) -> Tensor:
    """Every rank's numbers [ranks, numbers], float64, on every rank.

    Raises:
        RankLost: a rank has ended.
    """
    group = group_or_world(group)
    me, size = group.rank(), group.size()
    table = torch.zeros(size, len(mine), dtype=torch.float64)
    table[me] = torch.tensor(mine, dtype=torch.float64)
    table = table.to(message_device(group))
    if me == 0:
        exchange_by_peer(
            [], [(table[peer], peer) for peer in range(1, size)], group, at
        )
        exchange_by_peer([(table, peer) for peer in range(1, size)], [], group, at)
    else:
        exchange_by_peer([(table[me], 0)], [], group, at)
        exchange_by_peer([], [(table, 0)], group, at)
    return table


def raise_together(
    error: Exception | None, group: ProcessGroup | None, data_group: ProcessGroup | None
) -> NoReturn:
    """Raise on every rank what some of them have; all call it, with theirs or None."""
    if isinstance(error, NothingArrived):
        error = None
    errors = ValueError, RuntimeError
    with ExitStack() as stack:
        if data_group is not None:
            stack.enter_context(raising_everywhere(*errors, group=data_group))
        stack.enter_context(raising_everywhere(*errors, group=group))
        if error is not None:
            raise error
    raise AssertionError("unreachable: some rank has an error")
