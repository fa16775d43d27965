# python snippets/wrong/lc3/state_in_a_local.py
import torch
from torch import nn


class Adam:
    def __init__(self, parameters, lr):
        self.parameters, self.lr, self.t = list(parameters), lr, 0
        self.means = [torch.zeros_like(p) for p in self.parameters]
        self.squares = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p, m, v in zip(self.parameters, self.means, self.squares, strict=True):
            m = 0.9 * m + 0.1 * p.grad  # the bug: a new tensor under the old name,
            v = 0.999 * v + 0.001 * p.grad**2  # and the lists keep their zeros
            scale = (v / (1 - 0.999**self.t)).sqrt() + 1e-8
            p -= self.lr * (m / (1 - 0.9**self.t)) / scale


def train(optimizer_class, steps):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(100).double())
    target = torch.randn(100).double()
    optimizer = optimizer_class([weight], lr=0.01)
    for _step in range(steps):
        weight.grad = None
        (weight - target).square().sum().backward()
        optimizer.step()
    return weight.detach(), (weight - target).square().sum().item()


if __name__ == "__main__":
    for steps in (1, 2, 3, 10, 1000):
        mine, loss = train(Adam, steps)
        theirs, right = train(torch.optim.Adam, steps)
        off = (mine - theirs).abs().max().item()
        print(f"{steps:4} steps: off {off:.4f}, loss {loss:.2f}, torch {right:.2f}")
