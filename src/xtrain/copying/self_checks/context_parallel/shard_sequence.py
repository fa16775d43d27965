"""All tokens are on one rank each, and with zigzag all ranks have as much to do."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import Sent, same, sends
from xtrain.whiteboard.context_parallel.shard_sequence import shard_sequence


def check(rank: int, size: int) -> None:
    positions = torch.arange(48)
    expected = {
        "none": 12 * rank + torch.arange(12),
        "striped": rank + size * torch.arange(12),
        "zigzag": torch.cat([6 * r + torch.arange(6) for r in (rank, 7 - rank)]),
    }
    with Sent() as sent:
        parts = {b: shard_sequence(positions, 0, b) for b in expected}
        tokens = shard_sequence(positions.view(1, 48, 1).expand(2, 48, 3), 1, "zigzag")
    for balance, part in parts.items():
        same(f"the positions of rank {rank}, {balance}", part, expected[balance])
        total = torch.zeros(48, dtype=torch.int64).index_fill_(0, part, 1)
        dist.all_reduce(total)
        same("each of them on one rank", total, torch.ones_like(total))
    same("the tokens of a batch", tokens[1, :, 2], expected["zigzag"])
    keys = (parts["zigzag"] + 1).sum()  # that causal queries see
    same("a quarter of the work", keys, torch.tensor(48 * 49 // 2 // size))
    sends(sent, "nothing", 0)
