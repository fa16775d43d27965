# python snippets/wrong/lc5/recompute.py
import torch
from torch import nn


class Checkpoint(torch.autograd.Function):
    """Backward computes `module(x)` once more; so far this is right."""

    @staticmethod
    def forward(ctx, module, detach, x):
        ctx.module, ctx.detach = module, detach
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            if ctx.detach:  # otherwise, the bug: backward goes on behind x
                x = x.detach().requires_grad_()
            y = ctx.module(x)  # the bug: dropout draws another mask
        y.backward(dy)
        return None, None, x.grad if x.is_leaf else None


if __name__ == "__main__":
    for name, module, detach in (
        ("not detached", nn.Tanh(), False),
        ("detached", nn.Tanh(), True),
        ("detached, dropout", nn.Dropout(0.5), True),
    ):
        torch.manual_seed(0)
        x, w = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
        y = Checkpoint.apply(module, detach, x)
        y.sum().backward()
        right = y.detach() if "dropout" in name else 1 - y.detach() ** 2
        print(f"{name}: gradient {x.grad[0]:.2f} {x.grad[1]:.2f} {x.grad[2]:.2f}, "
              f"right is {right[0]:.2f} {right[1]:.2f} {right[2]:.2f}")  # fmt: skip
        try:
            Checkpoint.apply(module, detach, w * 2).sum().backward()
        except RuntimeError as error:
            print(f"{name}, x computed: {str(error).split('(')[0]}")
