# python snippets/wrong/lc4/float_is_an_alias.py
import torch


def cross_entropy(logits, labels):
    """Computed in fp32, in the memory of the fp32 copy."""
    x = logits.detach().float()  # the bug: fp32 logits are not copied
    x -= x.amax(-1, keepdim=True)
    target = x.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (x.exp_().sum(-1).log() - target).mean()


if __name__ == "__main__":
    labels = torch.tensor([1, 0])
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=dtype)
        loss = cross_entropy(logits, labels)
        values = [[round(value, 3) for value in row] for row in logits.tolist()]
        print(f"{dtype}: loss {loss:.3f}, the logits are now {values}")
