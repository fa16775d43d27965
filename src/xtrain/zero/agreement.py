"""Questions that all ranks answer together: a mistake is an error on every rank."""

from collections.abc import Iterable

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
    the others waiting for it."""
    problems: list = [None] * rank_and_size(group)[1]
    dist.all_gather_object(problems, problem, group=group)
    found = list(dict.fromkeys(p for p in problems if p))
    if found:
        raise error("; ".join(found))
