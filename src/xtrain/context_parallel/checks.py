"""What attention over several ranks refuses, on every rank, before anything is sent."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import check_same
from xtrain.comm.checks import message_device, rank_and_size
from xtrain.context_parallel.balance import check_balance
from xtrain.context_parallel.flash import checked_scale


def check_attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup | None,
    balance: str = "none",
    **options: Any,
) -> None:
    """ValueError on every rank unless all call alike, with sequences cut alike.

    One all-reduce of three numbers. (On a GPU each rank looks at its own call only: to
    read what all have said would make the CPU wait.)
    """
    _, size = rank_and_size(group)
    problem = None
    try:
        check_shapes(q, k, v, balance, size, **options)
    except ValueError as error:
        problem = f"{name}: {error}"
    said = {"q": list(q.shape), "k": list(k.shape), "dtype": q.dtype, **options}
    said["balance"] = balance
    device = message_device(group)
    if device.type != "cpu":
        if problem is not None:
            raise ValueError(problem)
        return
    digest = int(hashlib.sha256(repr(said).encode()).hexdigest()[:12], 16)
    numbers = torch.tensor([int(problem is not None), digest, -digest])
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    wrong, most, least = numbers.tolist()
    if wrong or most != -least:
        check_same(f"calls of {name}", [], group, said, problem)


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, balance: str, size: int, **options: Any
) -> None:
    """ValueError unless this rank's tensors are those of attention."""
    checked_scale(q, k, v, None)
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, but must be floating and of "
            "one dtype"
        )
    if q.shape[2] != k.shape[2] and (options.get("causal") or balance != "none"):
        raise ValueError(
            f"{q.shape[2]} local queries and {k.shape[2]} keys: only attention that is "
            "neither causal nor balanced may have different numbers of them"
        )
    check_balance(balance, k.shape[2] * size, size)
