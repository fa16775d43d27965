# python snippets/wrong/lc5/backward_by_hand.py
import torch


def not_advanced(weights, xs, dy):
    """Backward of the layers x @ w.t() of one stage; `xs` are their inputs."""
    for w, x in zip(reversed(weights), reversed(xs), strict=True):
        dx = dy @ w  # the bug: this dx has to become the next layer's dy
        w.grad = w.grad + dy.t() @ x
    return dx


def overwritten(weights, xs, dy):
    for w, x in zip(reversed(weights), reversed(xs), strict=True):
        w.grad = dy.t() @ x  # the bug: the micro-batches before are gone
        dy = dy @ w
    return dy


def off_by(backward, layers, micro_batches):
    """How far the gradient of the first weight is from autograd's."""
    torch.manual_seed(0)
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(layers)]
    found = [w.detach().clone() for w in weights]
    for w in found:
        w.grad = torch.zeros_like(w)
    for x in torch.randn(micro_batches, 2, 3):
        xs = [x]
        for w in found:
            xs.append(xs[-1] @ w.t())
        backward(found, xs[:-1], torch.ones(2, 3))
        for w in weights:
            x = x @ w.t()
        x.sum().backward()
    right = weights[0].grad
    return (found[0].grad - right).norm() / right.norm()


if __name__ == "__main__":
    for backward in (not_advanced, overwritten):
        for layers, m in ((1, 1), (2, 1), (1, 2)):
            print(f"{backward.__name__:12} {layers} layers a stage, {m} micro-batches: "
                  f"off by {off_by(backward, layers, m):.0%}")  # fmt: skip
