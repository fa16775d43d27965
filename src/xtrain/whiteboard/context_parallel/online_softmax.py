"""Online softmax: attention over keys that come in blocks, in three running sums.

    m      the largest score so far
    total  the sum of e^(score - m)              a larger m comes: both sums are
    out    the same sum, of the values           multiplied by e^(old m - new m)

Computes:   softmax(scores) @ values [..., Q, D], and the log-sum-exp [..., Q].
Sends:      nothing; the state is what ranks of a ring would send each other.
Leaves out: the backward, and checks. A row that sees no key gives 0, and -inf.
"""

import torch
from torch import Tensor


def online_softmax(
    scores: Tensor, values: Tensor, block_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Scores [..., Q, K] and values [..., K, D]; -inf hides a key from a query."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    m = scores.new_full((*scores.shape[:-1], 1), -torch.inf, dtype=wide)
    total, out = torch.zeros_like(m), torch.zeros_like(m)
    for i in range(0, scores.shape[-1], block_size):
        s = scores[..., i : i + block_size].to(wide)
        v = values[..., i : i + block_size, :].to(wide)
        largest = torch.maximum(m, s.amax(-1, keepdim=True))
        # Nothing seen so far: -inf - -inf would be NaN, and e^(-inf - 0) is 0.
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        p, shrink = (s - shift).exp(), (m - shift).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        out = out * shrink + p @ v
        m = largest
    out = out / total.masked_fill(total == 0, 1.0)
    return out.to(values.dtype), (m + total.log()).squeeze(-1)
