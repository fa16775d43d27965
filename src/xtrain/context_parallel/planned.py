"""The mask of a call: made for it, or once for a batch and handed to every layer.

    mask = sequence_mask(tokens, balance="zigzag", documents=documents)   once a batch
    out = ring_attention(q, k, v, balance="zigzag", mask=mask)            in each layer

So the ids of documents are gathered once, and which tiles see each other is decided
once, for all layers and both passes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import describe, problem_of
from xtrain.comm.call_agreement import check_same_call
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH
from xtrain.context_parallel.balance import Balance, check_balance
from xtrain.context_parallel.checks import check_hidden
from xtrain.context_parallel.sequence_mask import SequenceMask


def sequence_mask(
    tokens: int,
    causal: bool = True,
    balance: Balance = "none",
    window: int | None = None,
    documents: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> SequenceMask:
    """What all tokens see, for `mask=` of any number of attentions.

    Args:
        tokens: of one rank.
        documents: [B, tokens], this rank's, as `ring_attention` takes them.

    Raises:
        ValueError: on every rank: what does not fit, or differs between ranks.
    """
    _, size = rank_and_size(group)
    batch = len(documents) if isinstance(documents, Tensor) and documents.dim() else 0
    problem = problem_of(
        lambda: check_balance(balance, tokens * size, size),
        lambda: check_hidden((batch, tokens, tokens), causal, window, documents),
    )
    same: dict[str, Any] = {"tokens": tokens, "causal": causal, "balance": balance}
    same |= {"window": window, "documents": documents}
    if isinstance(documents, Tensor):
        same["documents"] = describe(documents)
    check_same_call("sequence_mask", (group,), same, problem)
    ids = gather_documents(documents, group)
    return SequenceMask(size, tokens, tokens, causal, balance, window, ids)


def mask_of_call(
    q: Tensor,
    k: Tensor,
    causal: bool,
    balance: Balance,
    window: int | None,
    documents: Tensor | None,
    group: ProcessGroup | None,
    mask: SequenceMask | None = None,
) -> SequenceMask:
    """The one that is given, or else that of these arguments."""
    if mask is not None:
        return mask
    _, size = rank_and_size(group)
    ids = gather_documents(documents, group)
    return SequenceMask(size, q.shape[2], k.shape[2], causal, balance, window, ids)


def gather_documents(
    documents: Tensor | None, group: ProcessGroup | None
) -> Tensor | None:
    """The ids of all ranks, [size, B, S], on the CPU, where masks are made."""
    if documents is None:
        return None
    mine = documents.detach().to(torch.int64).contiguous()
    gathered = mine.new_empty(rank_and_size(group)[1], *mine.shape)
    TORCH.all_gather(gathered.view(-1), mine.view(-1), group=group).wait()
    return gathered.cpu()
