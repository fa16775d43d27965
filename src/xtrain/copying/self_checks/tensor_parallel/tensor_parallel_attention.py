"""Eight query heads with 8 key heads, and with 2, which several ranks may share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, say, sends

HEADS, HEAD_DIM, HIDDEN = 8, 4, 6


class Attention(nn.Module):
    def __init__(self, key_heads: int):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, key_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, key_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


SIZES = (1, 2, 4, 8)


def check(form: Any, rank: int, size: int) -> None:
    x, grad = (randn(3, 5, HIDDEN, seed=n) for n in (1, 2))
    for key_heads in (8, 2):
        torch.manual_seed(0)  # the same whole layer on every rank
        full = Attention(key_heads)
        layer = form(full, head_dim=HEAD_DIM)
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = full(whole)
        y.backward(grad)
        with Sent() as ahead:
            out = layer(mine)
        with Sent() as back:
            out.backward(grad)
        say(f"{HEADS} query heads, {key_heads} key heads:")
        same("the output", out, y)
        same("dX", gradient(mine), gradient(whole))
        for name, parameter in layer.named_parameters():
            dim, expected = int(name == "o_proj"), gradient(getattr(full, name).weight)
            if name in ("k_proj", "v_proj"):
                heads = expected.unflatten(0, (-1, HEAD_DIM))
                expected = heads.repeat_interleave(
                    max(1, size // key_heads), 0
                ).flatten(0, 1)
            part = expected.chunk(size, dim)[rank]
            same(f"this rank's gradient of {name}", gradient(parameter), part)
        ring, shared = 2 * (size - 1) / size, (full.k_proj, full.v_proj)
        sends(ahead, "2(N-1)/N of y forward", ring * y.nbytes)
        nbytes = sum(p.weight.nbytes for p in shared) * (size > key_heads) + x.nbytes
        words = "of x backward, and of dW_k and dW_v if K < N"
        sends(back, words, ring * nbytes)
