"""Two layers that read x: their features are those of the gathered sequence."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    near,
    randn,
    sends,
)
from xtrain.whiteboard.tensor_parallel.ring_all_gather_matmul import (
    ring_all_gather_matmul,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for shape, dim in (((size,), 0), ((3, 2 * size), 1), ((size, 3), 0)):
        x = randn(*shape, 2 * size, seed=1, dtype=dtype)
        weights = [randn(3 * size, 2 * size, seed=s, dtype=dtype) for s in (2, 3)]
        rows = [weight.chunk(size)[rank] for weight in weights]
        with Sent(group) as sent:
            found = ring_all_gather_matmul(x.chunk(size, dim)[rank], rows, dim, group)
        for number, (y, weight) in enumerate(zip(found, weights, strict=True)):
            whole = x.double() @ weight.double().mT
            what = f"features of layer {number}, all of {shape} tokens"
            near(what, y, whole.chunk(size, -1)[rank], dtype, group)
    formula = f"(N-1)/N of {x.nbytes:,} bytes of x"
    sends(sent, formula, (size - 1) / size * x.nbytes, group)
