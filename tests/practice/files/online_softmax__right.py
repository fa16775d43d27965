import torch


def online_softmax(scores, values, block_size=128):
    """Blocks are merged by their log-sum-exp."""
    dtype = values.dtype
    scores, values = scores.double(), values.double()
    out = values.new_zeros(*scores.shape[:-1], values.shape[-1])
    lse = scores.new_full(scores.shape[:-1], float("-inf"))
    blocks = zip(scores.split(block_size, -1), values.split(block_size, -2))
    for s, v in blocks:
        new = torch.logaddexp(lse, s.logsumexp(-1))
        safe = torch.where(new == float("-inf"), 0.0, new).unsqueeze(-1)
        out = out * (lse.unsqueeze(-1) - safe).exp() + (s - safe).exp() @ v
        lse = new
    wide = torch.promote_types(dtype, torch.float32)
    return out.to(dtype), lse.to(wide)
