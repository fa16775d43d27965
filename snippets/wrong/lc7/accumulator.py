# python snippets/wrong/lc7/accumulator.py
import torch


def input_gradient(dy, tokens, weights, start):
    """dx [T, H]: each expert adds the part of the tokens that it had."""
    dx = start(dy)
    for chosen, weight in zip(tokens, weights, strict=True):
        dx.index_add_(0, chosen, dy[chosen] @ weight)
    return dx


def unset(dy):
    return torch.empty_like(dy)  # the bug: whatever the memory holds


def kept(dy, buffers={}):
    # The bug: a buffer for all steps holds the sum of the step before.
    return buffers.setdefault(dy.shape, torch.zeros_like(dy))


def zeros(dy):
    return torch.zeros_like(dy)


if __name__ == "__main__":
    torch.manual_seed(0)
    dy, weights = torch.randn(6, 4), torch.randn(2, 4, 4)
    tokens = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 5])  # token 3 was dropped
    # Then torch fills memory that was not set with NaN.
    torch.use_deterministic_algorithms(True)
    for start in (unset, kept, zeros):
        first, second = (input_gradient(dy, tokens, weights, start).clone()
                         for _ in range(2))  # fmt: skip
        print(f"{start.__name__:5}: NaN in {first.isnan().sum().item():2} numbers, "
              f"the same step twice gives |dx| {first.norm():.2f} and "
              f"{second.norm():.2f}")  # fmt: skip
