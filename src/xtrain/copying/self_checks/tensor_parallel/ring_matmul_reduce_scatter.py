"""A row layer's output, summed over the ranks: each keeps its slice of the tokens."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    near,
    randn,
    sends,
)
from xtrain.whiteboard.tensor_parallel.ring_matmul_reduce_scatter import (
    ring_matmul_reduce_scatter,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for shape, dim in (((size,), 0), ((3, 2 * size), 1), ((size, 3), 0)):
        x = randn(*shape, 2 * size, seed=1, dtype=dtype)
        weight = randn(3 * size, 2 * size, seed=2, dtype=dtype)
        columns, features = weight.chunk(size, 1)[rank], x.chunk(size, -1)[rank]
        with Sent(group) as sent:
            y = ring_matmul_reduce_scatter(features, columns, dim, group)
        whole = (x.double() @ weight.double().mT).chunk(size, dim)[rank]
        near(f"a part of {shape} tokens, all features", y, whole, dtype, group)
    nbytes = size * y.nbytes
    sends(sent, f"(N-1)/N of {nbytes:,} bytes of y", (size - 1) * y.nbytes, group)
