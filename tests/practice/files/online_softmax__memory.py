import torch


def online_softmax(scores, values, block_size=128):
    start, parts = 0, []
    n = scores.shape[-1]
    while start < n:
        stop = min(start + block_size, n)
        parts.append((scores[..., start:stop].clone(), torch.zeros(1 << 24)))
        if stop == start + block_size:
            start = stop
    lse = torch.cat([p for p, _ in parts], -1).logsumexp(-1)
    return (scores - lse[..., None]).exp() @ values, lse
