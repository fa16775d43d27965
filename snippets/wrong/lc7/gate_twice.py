# python snippets/wrong/lc7/gate_twice.py
import torch


def moe(x, gates, experts, weights):
    """y_t = sum of g W_e x_t over the experts e of token t; and each W_e x_t."""
    out = torch.einsum("tkoh,th->tko", weights[experts], x)
    return (gates[..., None] * out).sum(1), out


def backward(dy, x, gates, experts, weights, rule):
    """dx, dgates and dweights, by hand."""
    out = moe(x, gates, experts, weights)[1]
    dout, back, dgates = rule(dy[:, None], gates[..., None], out)
    dx = back * torch.einsum("tko,tkoh->tkh", dout, weights[experts])
    dw = torch.einsum("tko,th->tkoh", dout, x)
    dweights = torch.zeros_like(weights)
    return dx.sum(1), dgates, dweights.index_put_((experts,), dw, accumulate=True)


def twice(dy, g, out):
    # The bug: dx is combined like outputs are, with the gate, which dout has already.
    return g * dy, g, (g * dy * out).sum(-1)


def never(dy, g, out):
    return dy.expand_as(out), 1, (dy * out).sum(-1)  # the bug: experts get dY


def once(dy, g, out):
    return g * dy, 1, (dy * out).sum(-1)


if __name__ == "__main__":
    torch.manual_seed(0)
    x, dy, weights = torch.randn(6, 4), torch.randn(6, 4), torch.randn(3, 4, 4)
    scores, experts = torch.randn(6, 3).topk(2)
    leaves = [t.requires_grad_() for t in (x, scores.softmax(-1).detach(), weights)]
    y = moe(leaves[0], leaves[1], experts, leaves[2])[0]
    right = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        for rule in (twice, never, once):
            found = backward(dy, x, leaves[1], experts, weights, rule)
            wrong = [(a - b).norm() / b.norm() for a, b in zip(found, right)]
            print(f"gate {rule.__name__:5}: error of dx, dgates, dweights "
                  f"{[f'{e:.2f}' for e in wrong]}")  # fmt: skip
