"""Any size of block gives torch's softmax, also if keys are hidden from a row."""

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.context_parallel.online_softmax import online_softmax


def check(rank: int, size: int) -> None:
    scores = 100 * randn(2, 3, 10, seed=rank, dtype=torch.float64)
    values = randn(2, 10, 4, seed=5, dtype=torch.float64)
    scores[0, 1, :7] = -torch.inf  # the first blocks hold nothing that this row sees
    expected = scores.softmax(-1) @ values
    with Sent() as sent:
        for block in (1, 3, 10):
            out, lse = online_softmax(scores, values, block)
            same(f"attention in blocks of {block}", out, expected, 1e-12)
            same("its log-sum-exp", lse, scores.logsumexp(-1), 1e-12)
    out, lse = online_softmax(torch.full_like(scores, -torch.inf), values, 4)
    same("rows that see no key", out, torch.zeros_like(out))
    assert lse.eq(-torch.inf).all()
    sends(sent, "nothing", 0)
