# python snippets/wrong/lc6/transposed.py
import torch


def transposed(dS, q, k, scale):
    return dS.mT @ k * scale, dS @ q * scale  # the bug: each has the other's dS


def unscaled(dS, q, k, scale):
    return dS @ k, dS.mT @ q  # the bug: the scores were scaled, and these are not


def right(dS, q, k, scale):
    return dS @ k * scale, dS.mT @ q * scale


def backward(dO, q, k, v, rule):
    """dq, dk and dv of softmax(q k^T scale) v; q [S, D], k and v [T, D]."""
    scale = q.shape[-1] ** -0.5
    P = (q @ k.mT * scale).softmax(-1)
    dP = dO @ v.mT
    dS = P * (dP - (dP * P).sum(-1, keepdim=True))
    return *rule(dS, q, k, scale), P.mT @ dO


if __name__ == "__main__":
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 4, requires_grad=True) for _ in range(3))
    dO = torch.randn(6, 4)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), dO)
    for rule in (transposed, unscaled, right):
        found = backward(dO, q, k, v, rule)
        sizes = [f"{x.norm() / y.norm():.2f}" for x, y in zip(found, expected)]
        wrong = [f"{(x - y).norm() / y.norm():.2f}" for x, y in zip(found, expected)]
        print(f"{rule.__name__:10} of dq, dk, dv: size {sizes}, error {wrong}")
    try:
        backward(dO, q, k[:3], v[:3], transposed)
    except RuntimeError:
        print("transposed with 6 queries and 3 keys: the shapes do not fit")
