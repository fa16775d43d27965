# python snippets/wrong/lc6/masked_block.py
import torch


def online_softmax(scores, values, block_size):
    """Running maximum, sum and output of each row."""
    m = torch.full_like(scores[:, :1], -torch.inf)
    total, out = torch.zeros_like(m), torch.zeros_like(m)
    for s, v in zip(scores.split(block_size, -1), values.split(block_size)):
        largest = torch.maximum(m, s.amax(-1, keepdim=True))
        shrink = (m - largest).exp()  # the bug: -inf - -inf if nothing is seen yet
        p = (s - largest).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        out = out * shrink + p @ v
        m = largest
    return out / total


if __name__ == "__main__":
    torch.manual_seed(0)
    scores, values = torch.randn(2, 6), torch.ones(6, 1)
    print("all keys seen:     ", online_softmax(scores, values, 2).flatten().tolist())
    scores[0, 4:] = -torch.inf
    print("the last block not:", online_softmax(scores, values, 2).flatten().tolist())
    scores[0, :2] = -torch.inf
    print("nor the first one: ", online_softmax(scores, values, 2).flatten().tolist())
