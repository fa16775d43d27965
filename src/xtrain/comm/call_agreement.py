"""Do all ranks make the same call? One small all-reduce each time it is made.

Each rank gives a digest of its call's arguments and the negative of it. The largest
digest equals the smallest if and only if all agree. If they differ, all ranks gather
the arguments in words, and all raise.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.agreement import check_same, digest
from xtrain.comm.checks import message_device

_is_counted: ContextVar[bool] = ContextVar("is_counted", default=True)


def is_counted() -> bool:
    """Whether a ledger counts the calls of this rank now."""
    return _is_counted.get()


@contextmanager
def uncounted() -> Iterator[None]:
    """Calls made inside are a check's own questions: no ledger counts them."""
    before = _is_counted.set(False)
    try:
        yield
    finally:
        _is_counted.reset(before)


def check_same_call(
    name: str,
    groups: Sequence[ProcessGroup | None],
    arguments: Mapping[str, object],
    problem: str | None,
) -> None:
    """ValueError on every rank if one has a problem or other arguments.

    On a GPU each rank checks its own call only: reading the answer would make the CPU
    wait.

    Args:
        groups: the axes of the mesh whose ranks are asked.
        arguments: compared by what they print as.
    """
    problem = problem and with_name(name, problem)
    if all(message_device(group).type == "cpu" for group in groups):
        number = digest(arguments)
        numbers = torch.tensor([int(problem is not None), number, -number])
        for group in groups:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        wrong, most, least = numbers.tolist()
        if not wrong and most == -least:
            return
        for group in groups:  # the second axis spreads what the first has found
            problem = verdict(name, group, arguments, problem)
    if problem is not None:
        raise ValueError(with_name(name, problem))


def check_same_on(
    what: str,
    groups: Sequence[ProcessGroup | None],
    arguments: Mapping[str, object],
    problem: str | None = None,
) -> None:
    """`check_same` over several axes, on any device; no ledger counts it."""
    with uncounted():
        for group in groups:
            problem = verdict(what, group, arguments, problem)
    if problem is not None:
        raise ValueError(problem)


def reduce_question(
    number: Tensor,
    group: ProcessGroup | None,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
) -> None:
    """All-reduce a number that a check asks for; no ledger counts it."""
    with uncounted():
        dist.all_reduce(number, op, group=group)


def with_name(name: str, problem: str) -> str:
    """The problem, and the call that has it."""
    return problem if name in problem else f"{name}: {problem}"


def verdict(
    what: str,
    group: ProcessGroup | None,
    arguments: Mapping[str, object],
    problem: str | None,
) -> str | None:
    """The message of `check_same`, the same on every rank of the group."""
    try:
        check_same(what, [], group, arguments, problem)
    except ValueError as error:
        return str(error)
    return None
