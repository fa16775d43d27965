# python snippets/wrong/lc7/discarded_loss.py
import torch
import torch.nn.functional as F


class AddLoss(torch.autograd.Function):
    """Gives x as it is; backward then begins at the loss, too."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.loss = loss.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(ctx.loss)


def discarded(y, loss):
    AddLoss.apply(y, loss)  # the bug: nothing goes on with what it returned
    return y


def added(y, loss):
    return AddLoss.apply(y, loss)


def step(x, router, attach, coefficient=0.5):
    """Gradient of a router, one expert a token; and the share of each expert."""
    p = (x @ router.T).softmax(-1)
    gates, experts = p.max(-1)
    f = F.one_hot(experts, len(router)).to(p).mean(0)
    loss = coefficient * len(router) * (f * p.mean(0)).sum()
    y = attach(gates[:, None] * x, loss)
    (grad,) = torch.autograd.grad((y - x).square().mean(), router)
    return grad, f


if __name__ == "__main__":
    for attach in (discarded, added):
        torch.manual_seed(0)
        x, router = torch.randn(256, 4) + 1, torch.randn(4, 4, requires_grad=True)
        busiest = []
        for _ in range(101):
            grad, f = step(x, router, attach)
            busiest.append(f.max().item())
            router = (router - grad).detach().requires_grad_()
        print(f"{attach.__name__:9}: share of the busiest of 4 experts "
              f"{busiest[0]:.2f}, after 100 steps {busiest[-1]:.2f}")  # fmt: skip
