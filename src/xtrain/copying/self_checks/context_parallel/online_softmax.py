"""Any size of block gives torch's softmax, also if keys are hidden from a row."""

import torch

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    near,
    randn,
    same,
    sends,
)
from xtrain.whiteboard.context_parallel.online_softmax import (
    online_softmax,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    scores = 40 * randn(2, 3, 4, 13, seed=1, dtype=dtype)
    values = randn(2, 3, 13, 5, seed=2, dtype=dtype)
    scores[0, 0, :, :6] = -torch.inf  # the first blocks hold nothing that a row sees
    scores[1, 2, 3] = -torch.inf  # a row that sees no key
    wide = scores.double()
    exact = torch.nan_to_num(wide.softmax(-1)) @ values.double()
    seen = wide.logsumexp(-1).isfinite()
    of_lse = torch.promote_types(dtype, torch.float32)
    with Sent(group) as sent:
        for block in (1, 2, 5, 13, 128):
            out, lse = online_softmax(scores, values, block)
            near(f"attention in blocks of {block}", out, exact, dtype, group)
            log = wide.logsumexp(-1)[seen]
            near("its log-sum-exp", lse[seen], log, of_lse, group)
            zero = torch.zeros_like(out[1, 2, 3])
            same("a row that sees no key", out[1, 2, 3], zero, 0, group)
            assert lse[~seen].eq(-torch.inf).all()
    sends(sent, "nothing", 0, group)
