"""Whether all ranks make the same call: one small message each time it is made.

A digest of what a rank says of its call, and its negative: if the largest of each over
all ranks belong together, all have said the same. Only then is it over; else all ranks
tell each other in words, and all raise.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.agreement import check_same
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


def check_calls(
    name: str,
    groups: Sequence[ProcessGroup | None],
    said: Mapping[str, object],
    problem: str | None,
) -> None:
    """ValueError on every rank if one has a problem or says something else.

    On a GPU each rank looks at its own call only: to read what all have said would make
    the CPU wait.

    Args:
        groups: the axes of the mesh whose ranks are asked.
        said: compared by what it prints as.
    """
    if any(message_device(group).type != "cpu" for group in groups):
        if problem is not None:
            raise ValueError(with_name(name, problem))
        return
    number = digest(said)
    numbers = torch.tensor([int(problem is not None), number, -number])
    for group in groups:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    wrong, most, least = numbers.tolist()
    if not wrong and most == -least:
        return
    for group in groups:  # what a row has found, its columns tell all others
        problem = verdict(name, group, said, problem)
    if problem is not None:
        raise ValueError(with_name(name, problem))


def digest(what: object) -> int:
    """A number of 48 bits for what something prints as."""
    return int(hashlib.sha256(repr(what).encode()).hexdigest()[:12], 16)


def check_same_on(
    what: str,
    groups: Sequence[ProcessGroup | None],
    said: Mapping[str, object],
    problem: str | None = None,
) -> None:
    """The same in words at once, on any device; no ledger counts it."""
    with uncounted():
        for group in groups:
            problem = verdict(what, group, said, problem)
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
    """The problem, and whose it is."""
    return problem if name in problem else f"{name}: {problem}"


def verdict(
    what: str,
    group: ProcessGroup | None,
    said: Mapping[str, object],
    problem: str | None,
) -> str | None:
    """What `check_same` says on every rank of the group."""
    try:
        check_same(what, [], group, said, problem)
    except ValueError as error:
        return str(error)
    return None
