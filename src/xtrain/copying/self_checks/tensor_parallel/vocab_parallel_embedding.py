"""The output has the whole table's bits, the gradient is a part of its gradient."""

import torch
import torch.distributed as dist
from torch import nn

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    gradient,
    in_both,
    near,
    randn,
    same,
    sends,
)
from xtrain.whiteboard.tensor_parallel.vocab_parallel_embedding import (
    VocabParallelEmbedding,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    low, exact = in_both(nn.Embedding(5 * size, 6), dtype)
    layer = VocabParallelEmbedding(low, group)
    edges = torch.tensor([r * 5 + n for r in range(size) for n in (0, 4)])
    ids = torch.stack([edges, edges.flip(0)])  # the first and last row of every rank
    grad = randn(*ids.shape, 6, seed=1, dtype=dtype)
    exact(ids).backward(grad.double())
    with Sent(group) as sent:
        out = layer(ids)
        out.backward(grad)
    same("the rows of all ids", out.detach(), low(ids).detach(), 0, group)
    part = gradient(exact.weight).chunk(size)[rank]
    near("a part of the table's gradient", gradient(layer.weight), part, dtype, group)
    formula = f"2(N-1)/N of {out.nbytes:,} bytes of y"
    sends(sent, formula, 2 * (size - 1) / size * out.nbytes, group)
