# python snippets/lc4/linear_algebra.py
import torch

torch.manual_seed(0)
x, grad = torch.randn(5, 4).double(), torch.randn(5, 6).double()
weight = torch.randn(6, 4).double()  # [out, in], as nn.Linear stores it
y, dx, dw = x @ weight.T, grad @ weight, grad.T @ x


def report(split: str, found: dict[str, torch.Tensor]) -> None:
    whole = {"y": y, "dx": dx, "dW": dw}
    equal = {n: torch.allclose(t, whole[n], atol=1e-14) for n, t in found.items()}
    print(f"{split}: {equal}")


# by columns of the literature, which are dim 0 of the weight: y is split
weights, grads = weight.chunk(2, 0), grad.chunk(2, 1)
report("outputs split", {
    "y": torch.cat([x @ w.T for w in weights], 1),
    "dx": sum(g @ w for g, w in zip(grads, weights, strict=True)),  # a sum: f
    "dW": torch.cat([g.T @ x for g in grads], 0),
})  # fmt: skip

# by rows, which are dim 1 of the weight: x is split, and y is a sum
weights, parts = weight.chunk(2, 1), x.chunk(2, 1)
report("inputs split ", {
    "y": sum(p @ w.T for p, w in zip(parts, weights, strict=True)),  # a sum: g
    "dx": torch.cat([grad @ w for w in weights], 1),
    "dW": torch.cat([grad.T @ p for p in parts], 1),
})  # fmt: skip
