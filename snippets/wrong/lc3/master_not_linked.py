# python snippets/wrong/lc3/master_not_linked.py
import torch
from torch import nn


class MixedPrecision:
    """Steps float32 masters of bfloat16 parameters."""

    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = optimizer_class(self.masters, **options)

    @torch.no_grad()
    def step(self):
        pairs = list(zip(self.parameters, self.masters, strict=True))
        for parameter, master in pairs:
            master.grad = parameter.grad.float()
        self.optimizer.step()
        for parameter, master in pairs:
            parameter = master.to(parameter.dtype)  # the bug: names a new tensor


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(64, 4).bfloat16()  # the same draws in every version of torch
    layer = nn.Linear(4, 1, bias=False).bfloat16()
    mixed = MixedPrecision(layer.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(21):
        layer.zero_grad()
        loss = (layer(inputs) - inputs.sum(1, keepdim=True)).float().square().mean()
        loss.backward()
        mixed.step()
        if step % 5 == 0:
            weight, master = layer.weight[0, 0], mixed.masters[0][0, 0]
            print(f"step {step:2}: loss {loss.item():.3f}, "
                  f"weight {weight:.3f}, its master {master:.3f}")  # fmt: skip
