"""All tokens are on one rank each, and with zigzag all ranks have as much to do."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    same,
    sends,
)
from xtrain.whiteboard.context_parallel.shard_sequence import (
    shard_sequence,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    positions, last = torch.arange(12 * size), 2 * size - 1 - rank
    expected = {
        "none": 12 * rank + torch.arange(12),
        "striped": rank + size * torch.arange(12),
        "zigzag": torch.cat([6 * r + torch.arange(6) for r in (rank, last)]),
    }
    batch = torch.arange(24 * size * 6, dtype=dtype).view(2, 12 * size, 6)
    with Sent(group) as sent:
        parts = {b: shard_sequence(positions, 0, b, group) for b in expected}
        tokens = {
            (b, dim): shard_sequence(batch, dim, b, group)
            for b in expected
            for dim in (1, -2)
        }
    for balance, part in parts.items():
        what = f"the positions of rank {rank}, {balance}"
        same(what, part, expected[balance], 0, group)
        total = torch.zeros(12 * size, dtype=torch.int64).index_fill_(0, part, 1)
        dist.all_reduce(total, group=group)
        same("each of them on one rank", total, torch.ones_like(total), 0, group)
    for (balance, dim), part in tokens.items():
        what = f"the tokens of a batch, {balance}, dim {dim}"
        same(what, part, batch[:, expected[balance]], 0, group)
    keys = (parts["zigzag"] + 1).sum()  # that causal queries see
    fair = torch.tensor(6 * (12 * size + 1))
    same("as much work on every rank", keys, fair, 0, group)
    sends(sent, "nothing", 0, group)
