"""The loss is torch's, the gradient a part of the columns of torch's."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    gradient,
    near,
    randn,
    same,
    sends,
)
from xtrain.whiteboard.tensor_parallel.vocab_parallel_cross_entropy import (
    vocab_parallel_cross_entropy,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    wide = torch.promote_types(dtype, torch.float32)
    everywhere = torch.tensor([[0, 2, 3, -7, 5], [6, 8, 9, 11, -7]]) % (3 * size)
    everywhere[[0, 1], [3, 4]] = -7
    one_rank = torch.tensor([[0, 2, 1, 0, 1], [2, 2, 0, 1, 1]])  # has all the labels
    for scale in (1, 500):  # e^500 overflows
        for labels in (everywhere, one_rank):
            logits = scale * randn(2, 5, 3 * size, seed=1, dtype=dtype)
            whole = logits.to(torch.float64, copy=True).requires_grad_()
            mine = logits.chunk(size, -1)[rank].clone().requires_grad_()
            before = mine.detach().clone()
            exact = F.cross_entropy(
                whole.flatten(0, 1), labels.flatten(), ignore_index=-7
            )
            (1.5 * exact).backward()
            with Sent(group) as sent:
                loss = vocab_parallel_cross_entropy(mine, labels, -7, group)
                (1.5 * loss).backward()
            near(f"the loss, logits times {scale}", loss, exact, wide, group)
            part = gradient(whole).chunk(size, -1)[rank]
            near("its gradient's columns", gradient(mine), part, dtype, group)
            same("the logits, unchanged", mine.detach(), before, 0, group)
    nbytes = 3 * labels.numel() * wide.itemsize
    formula = f"2(N-1)/N of {nbytes:,} bytes, three numbers a token"
    sends(sent, formula, 2 * (size - 1) / size * nbytes, group)
    none = vocab_parallel_cross_entropy(mine, torch.full((2, 5), -100), group=group)
    mine.grad = None
    none.backward()
    same("no gradient without labels", gradient(mine), 0 * before, 0, group)
    same("no loss without labels", none.detach(), 0 * exact.detach().to(wide), 0, group)
