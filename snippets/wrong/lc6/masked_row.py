# python snippets/wrong/lc6/masked_row.py
import torch


def attention(q, k, v, seen):
    """Over the keys that each query sees; padding sees none."""
    scores = (q @ k.mT).masked_fill(~seen, -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    return p @ v / p.sum(-1, keepdim=True)  # the bug: 0 / 0 in a row without keys


def attention_right(q, k, v, seen):
    scores = (q @ k.mT).masked_fill(~seen, -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    total = p.sum(-1, keepdim=True)
    return p @ v / total.masked_fill(total == 0, 1.0)


def trained(attend, seen, counts):
    """Loss and gradient of the weight that makes the values."""
    torch.manual_seed(0)
    q, k, x = (torch.randn(4, 3) for _ in range(3))
    weight = torch.eye(3, requires_grad=True)
    out = attend(q, k, x @ weight, seen)
    loss = out[counts].square().sum()  # padding does not count
    loss.backward()
    return loss.item(), weight.grad


if __name__ == "__main__":
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    counts = torch.tensor([True, True, True, False])
    for padded in (False, True):
        seen[3] = not padded
        for attend in (attention, attention_right):
            loss, grad = trained(attend, seen, counts)
            what = "padding sees nothing" if padded else "every row sees a key"
            print(f"{what}, {attend.__name__:15}: loss {loss:.3f}, "
                  f"|dW| {grad.norm():.3f}")  # fmt: skip
