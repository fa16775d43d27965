# python snippets/wrong/lc7/slots.py
import torch
import torch.nn.functional as F


def positions(experts, count):
    """How many tokens before it have chosen the same expert."""
    chosen = F.one_hot(experts, count)
    return (chosen.cumsum(0) - chosen)[torch.arange(len(experts)), experts]


def clamped(x, experts, weights, capacity):
    """x [T, H] in slots [E, capacity, H], through the experts, and back."""
    slots = x.new_zeros(len(weights), capacity, x.shape[1])
    # The bug: a token that comes too late gets the last slot.
    at = experts, positions(experts, len(weights)).clamp(max=capacity - 1)
    slots[at] = x
    return (slots @ weights)[at]


def dropped(x, experts, weights, capacity):
    slots = x.new_zeros(len(weights), capacity, x.shape[1])
    position = positions(experts, len(weights))
    kept = position < capacity
    at = experts[kept], position[kept]
    slots[at] = x[kept]
    y = torch.zeros_like(x)
    y[kept] = (slots @ weights)[at]  # what was dropped is 0: the residual is left
    return y


if __name__ == "__main__":
    x, weights = torch.arange(1.0, 7.0)[:, None], torch.tensor([10.0, 100.0])
    experts = torch.tensor([0, 0, 1, 0, 0, 1])
    for capacity in (4, 2):
        for moe in (clamped, dropped):
            y = moe(x, experts, weights[:, None, None], capacity)
            print(f"capacity {capacity}, {moe.__name__:7}: tokens 1 to 6 give "
                  f"{y.flatten().int().tolist()}")  # fmt: skip
