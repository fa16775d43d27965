"""Questions that all ranks answer together: a mistake is an error on every rank."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size


def check_same_tensors(
    tensors: Iterable[tuple[str, Tensor]], group: ProcessGroup | None
) -> None:
    """ValueError on every rank unless all have the same names, shapes and dtypes."""
    mine = [(n, list(t.shape), str(t.dtype), t.requires_grad) for n, t in tensors]
    theirs: list = [None] * rank_and_size(group)[1]
    dist.all_gather_object(theirs, mine, group=group)
    for rank, other in enumerate(theirs):
        if other == theirs[0]:
            continue
        first, second = next(
            (a, b)
            for a, b in zip([*theirs[0], None], [*other, None], strict=False)
            if a != b
        )
        raise ValueError(
            f"ranks 0 and {rank} have different parameters: {first} and {second}"
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
