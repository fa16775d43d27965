"""Runs of ring attention for its page: what its messages carried, and their bytes."""

from typing import Any

import torch

from xtrain.comm import CommLedger
from xtrain.comm.checks import rank_and_size
from xtrain.context_parallel import ring_attention


def messages() -> dict[str, Any]:
    """Of causal attention with one token a rank: the owner of each K and V that this
    rank sent, the ranks that had added to each dK and dV, and to those that came home.

    Queries are 0, so a query sees all its keys alike. The gradient of rank r's output
    is 2^r for each of them, so dV is the sum of 2^r over the ranks that have added.
    """
    rank, size = rank_and_size(None)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (one * 0, -one, one * rank))
    with CommLedger(values=True) as forward:
        out = ring_attention(q, k, v)
    with CommLedger(values=True) as backward:
        out.backward(one * 2**rank * (rank + 1))
    sent = [values_sent(ledger) for ledger in (forward, backward)]
    assert v.grad is not None
    return {
        "keys": [round(v) for _, v in sent[0]],
        "keys again": [round(v) for k, v in sent[1] if k == -1],
        "gradients": [parts(v, size) for k, v in sent[1] if k != -1],
        "home": parts(v.grad.item(), size),
    }


def values_sent(ledger: CommLedger) -> list[tuple[float, ...]]:
    """What this rank's messages carried, in order."""
    return [e.values for e in ledger.events if e.kind == "send" and e.values]


def parts(dv: float, size: int) -> list[int]:
    """The ranks whose 2^r is in a sum."""
    return [rank for rank in range(size) if round(dv) >> rank & 1]


def bytes_sent(heads: int, key_heads: int, tokens: int, dtype: str) -> list[int]:
    """Bytes that this rank sends, forward and backward, with head dim 8."""
    kind = getattr(torch, dtype)
    q = torch.zeros(1, heads, tokens, 8, dtype=kind, requires_grad=True)
    k, v = (torch.zeros(1, key_heads, tokens, 8, dtype=kind) for _ in "kv")
    with CommLedger() as forward:
        out = ring_attention(q, k.requires_grad_(), v.requires_grad_())
    with CommLedger() as backward:
        out.backward(torch.zeros_like(out))
    return [
        sum(e.nbytes or 0 for e in ledger.events if e.kind == "send")
        for ledger in (forward, backward)
    ]
