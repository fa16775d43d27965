"""Questions that all ranks answer together: a mistake is an error on every rank."""

import torch.distributed as dist
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size


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
