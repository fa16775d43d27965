"""All tokens are on one rank each, and with zigzag all ranks have as much to do."""

from typing import Any

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import Here, Sent, same, sends


def check(form: Any, rank: int, size: int) -> None:
    positions = torch.arange(48)
    run = torch.arange(48 // size)
    pieces = positions.chunk(2 * size)
    expected = {
        "none": rank * len(run) + run,
        "striped": rank + size * run,
        "zigzag": torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]),
    }
    with Sent() as sent:
        parts = {b: form(positions, 0, b) for b in expected}
        tokens = form(positions.view(1, 48, 1).expand(2, 48, 3), 1, "zigzag")
    for balance, part in parts.items():
        same(f"the positions of rank {rank}, {balance}", part, expected[balance])
        total = torch.zeros(48, dtype=torch.int64).index_fill_(0, part, 1)
        dist.all_reduce(total, group=Here.group)
        same("each of them on one rank", total, torch.ones_like(total))
    same("the tokens of a batch", tokens[1, :, 2], expected["zigzag"])
    keys = (parts["zigzag"] + 1).sum()  # that causal queries see
    same("an equal part of the work", keys, torch.tensor(48 * 49 // 2 // size))
    sends(sent, "nothing", 0)
