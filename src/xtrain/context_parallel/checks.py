"""The checks of attention over several ranks, made before anything is sent."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import describe, problem_of
from xtrain.comm.call_agreement import check_same_call
from xtrain.comm.checks import Rule, rank_and_size
from xtrain.context_parallel.balance import Balance, check_balance
from xtrain.context_parallel.flash import checked_scale
from xtrain.context_parallel.sequence_mask import SequenceMask


def check_attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *groups: ProcessGroup | None,
    causal: bool,
    scale: float | None,
    balance: Balance = "none",
    window: int | None = None,
    documents: Tensor | None = None,
    mask: SequenceMask | None = None,
    rules: tuple[Rule, ...] = (),
) -> None:
    """ValueError on every rank unless all make the same legal call.

    Args:
        groups: the mesh axes to compare over; the last is the one `balance` cuts.
        rules: further rules about this rank's call.
    """
    sizes = [rank_and_size(group)[1] for group in groups]
    problem = problem_of(
        lambda: check_tensors(q, k, v, scale),
        lambda: check_lengths(q, k, causal, balance, sizes),
        lambda: check_hidden(
            (len(q), q.shape[2], k.shape[2]), causal, window, documents
        ),
        lambda: check_mask(q, k, causal, balance, window, documents, mask, sizes),
    )
    broken = [message for holds, message in rules if not holds]
    if problem is None and broken:
        problem = broken[0]
    trained = torch.is_grad_enabled()
    tensors = {"q": q, "k": k, "v": v, "documents": documents}
    arguments: dict[str, Any] = {
        key: describe(t if trained else t.detach()) if isinstance(t, Tensor) else t
        for key, t in tensors.items()
    }
    arguments |= {
        "causal": causal,
        "balance": balance,
        "scale": scale,
        "window": getattr(mask, "window", window),
        "mask": mask is not None,
    }
    check_same_call(name, groups, arguments, problem)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
    """ValueError unless these can be queries, keys and values."""
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is {type(tensor).__name__}, not a tensor")
    if not isinstance(scale, int | float | None):
        raise ValueError(f"scale={scale!r} is not a number")
    checked_scale(q, k, v, None)
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, but must be floating and of "
            "one dtype"
        )


def check_lengths(
    q: Tensor, k: Tensor, causal: bool, balance: Balance, sizes: list[int]
) -> None:
    """ValueError unless the lengths fit each other and `balance`."""
    queries, keys = q.shape[2], k.shape[2]
    if not queries or not keys:
        raise ValueError(
            f"{queries} local queries and {keys} keys: each rank needs some"
        )
    if queries != keys and (causal or balance != "none"):
        raise ValueError(
            f"{queries} local queries and {keys} keys: only attention that is neither "
            "causal nor balanced may have different numbers of them"
        )
    check_balance(balance, keys * math.prod(sizes), sizes[-1])


def check_hidden(
    sizes: tuple[int, int, int],
    causal: bool,
    window: int | None,
    documents: Tensor | None,
) -> None:
    """ValueError unless window and documents are valid.

    Args:
        sizes: of the batch, of local queries and of keys.
    """
    whole = isinstance(window, int) and not isinstance(window, bool)
    if window is not None and not (whole and window > 0 and causal):
        raise ValueError(
            f"window={window!r} with causal={causal}: a window is a whole number of "
            "keys from 1 on, and only causal attention has one"
        )
    if documents is None:
        return
    batch, queries, keys = sizes
    wrong = not isinstance(documents, Tensor) or queries != keys
    if wrong or list(documents.shape) != [batch, queries] or not is_integer(documents):
        found = describe(documents) if isinstance(documents, Tensor) else documents
        raise ValueError(
            f"documents are {found}, but must be whole numbers, {[batch, queries]} "
            f"([batch, local sequence]), with as many queries as keys ({keys})"
        )


def check_mask(
    q: Tensor,
    k: Tensor,
    causal: bool,
    balance: Balance,
    window: int | None,
    documents: Tensor | None,
    mask: SequenceMask | None,
    sizes: list[int],
) -> None:
    """ValueError unless a mask that was made before is that of this call."""
    if mask is None:
        return
    if not isinstance(mask, SequenceMask):
        raise ValueError(f"mask is {type(mask).__name__}, not of sequence_mask")
    if window is not None or documents is not None:
        raise ValueError("a mask has its window and documents: give them or the mask")
    batch = len(q) if mask.documents is None else mask.documents.shape[1]
    made = mask.size, batch, mask.queries, mask.keys, mask.causal, mask.balance
    asked = sizes[-1], len(q), q.shape[2], k.shape[2], causal, balance
    if repr(made) != repr(asked):
        raise ValueError(
            f"the mask was made for (ranks, batch, queries, keys, causal, balance) = "
            f"{made}, and the call has {asked}"
        )


def is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
