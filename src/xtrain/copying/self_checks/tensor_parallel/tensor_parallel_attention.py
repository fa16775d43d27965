"""More key heads than ranks, as many, or fewer: then some ranks hold the same head."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    gradient,
    in_both,
    near,
    randn,
    sends,
)
from xtrain.whiteboard.tensor_parallel.tensor_parallel_attention import (
    TensorParallelAttention,
)

HEAD_DIM, HIDDEN = 4, 6


class Attention(nn.Module):
    def __init__(self, heads: int, key_heads: int):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, key_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, key_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(heads * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tokens = 3 * size + 1
    x, grad = (randn(2, tokens, HIDDEN, seed=n, dtype=dtype) for n in (1, 2))
    turn = randn(tokens, HEAD_DIM, seed=3, dtype=dtype).sign()  # as positions do
    fewer = [n for n in range(1, size) if size % n == 0]
    for key_heads in (2 * size, size, *fewer):
        low, exact = in_both(Attention(2 * size, key_heads), dtype)
        layer = TensorParallelAttention(low, group, head_dim=HEAD_DIM)
        whole, mine = (
            x.to(torch.float64, copy=True).requires_grad_(),
            x.clone().requires_grad_(),
        )
        y = exact(whole, turn.double())
        y.backward(grad.double())
        with Sent(group) as sent:
            out = layer(mine, lambda heads: heads * turn)
            out.backward(grad)
        near(f"the output with {key_heads} key heads", out, y, dtype, group)
        near("dX", gradient(mine), gradient(whole), dtype, group)
        for name, parameter in layer.named_parameters():
            full = gradient(exact.get_parameter(f"{name}.weight"))
            if name in ("k_proj", "v_proj"):
                heads = full.unflatten(0, (-1, HEAD_DIM))
                replicas = max(1, size // key_heads)
                full = heads.repeat_interleave(replicas, 0).flatten(0, 1)
            part = full.chunk(size, int(name == "o_proj"))[rank]
            near(f"a part of d{name}", gradient(parameter), part, dtype, group)
        repeated = low.k_proj.weight.nbytes * 2 if key_heads < size else 0
        nbytes = 2 * out.nbytes + repeated
        formula = f"2(N-1)/N of {nbytes:,} bytes of y, dX, and dW_k, dW_v if K < N"
        sends(sent, formula, 2 * (size - 1) / size * nbytes, group)
