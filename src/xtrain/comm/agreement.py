"""Questions that all ranks answer together: a mistake is an error on every rank.

    rank 0   options, tensors, what is wrong here --+
    rank 1   options, tensors, what is wrong here --+--> all-gather --> the same verdict

A rank that raised alone would leave the others waiting in the next collective, and
ranks with other options would train on and be wrong. One exchange of a few bytes makes
an error on every rank of both. Wrappers ask `check_same` when they are built;
`raise_everywhere` and `raising_everywhere` serve what may fail on one rank later.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size

Named = Iterable[tuple[str, Tensor]]


def check_same(
    what: str,
    tensors: Named,
    group: ProcessGroup | None,
    options: Mapping[str, object] | None = None,
    problem: str | None = None,
) -> None:
    """ValueError on every rank unless all have the same options and the same tensors.

    Args:
        what: the name of all tensors together, for the message.
        tensors: compared by name, shape, dtype and whether they are trained.
        options: compared by what they print as.
        problem: what is wrong on this rank, whatever the others do.
    """
    chosen = {name: as_text(value) for name, value in (options or {}).items()}
    mine = problem, chosen, {name: describe(tensor) for name, tensor in tensors}
    theirs: list[Any] = [None] * rank_and_size(group)[1]
    dist.all_gather_object(theirs, mine, group=group)
    problems = [problem for problem, _, _ in theirs]
    if any(problems):
        raise ValueError(with_ranks(problems))
    for rank, (_, *both) in enumerate(theirs):
        for first, other, kind in zip(theirs[0][1:], both, ("", what), strict=True):
            differing = [n for n in {**first, **other} if first.get(n) != other.get(n)]
            if differing:
                name = differing[0]
                raise ValueError(
                    f"ranks 0 and {rank} have different {kind or name}: {name} is "
                    f"{first.get(name, 'missing')} and {other.get(name, 'missing')}"
                )


def raise_everywhere(
    error: type[Exception], problem: str | None, group: ProcessGroup | None
) -> None:
    """Raise on every rank when one has a problem; a rank that raised alone would leave
    the others waiting for it. The error names the ranks that have it, unless all do."""
    problems: list = [None] * rank_and_size(group)[1]
    dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        raise error(with_ranks(problems))


@contextmanager
def raising_everywhere(
    *errors: type[Exception], group: ProcessGroup | None, what: str = ""
) -> Iterator[None]:
    """What one rank's block raises, every rank raises at the end of its own.

    Args:
        errors: what may be raised, the most general last; that is also what anything
            else becomes. If ranks fail in different ways, the most general is raised.
        what: the error begins with it.
    """
    kind, problem, cause = -1, None, None
    try:
        yield
    except Exception as error:  # whatever it is, the others must hear of it
        fits = [n for n, known in enumerate(errors) if isinstance(error, known)]
        kind, cause = (fits or [len(errors) - 1])[0], error
        expected = isinstance(error, (*errors, OSError))
        problem = str(error) if expected else f"{type(error).__name__}: {error}"
    found: list = [None] * rank_and_size(group)[1]
    dist.all_gather_object(found, (kind, problem), group=group)
    kind = max(kind for kind, _ in found)
    if kind >= 0:
        raise errors[kind](what + with_ranks([p for _, p in found])) from cause


def with_ranks(problems: list[str | None]) -> str:
    """Each problem once, after the ranks that have it unless all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            ranks.setdefault(problem, []).append(rank)
    if list(map(len, ranks.values())) == [len(problems)]:
        return next(iter(ranks))
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {problem}"
        for problem, who in ranks.items()
    )


def value_of_rank_0(value: Any, group: ProcessGroup | None) -> Any:
    """Rank 0's value, any Python object, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype}{' trained' * tensor.requires_grad}"


def as_text(value: object) -> str:
    """A value as all ranks print it: no addresses, functions and classes by name."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    name = getattr(value, "__qualname__", None)
    return name or re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def problem_of(*checks: Callable[[], None]) -> str | None:
    """What the first check that fails says, for `check_same` to tell all ranks."""
    for check in checks:
        try:
            check()
        except ValueError as error:
            return str(error)
    return None
