"""The norm and the clipped shards are those of torch's function on all gradients."""

from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    whole = nn.Parameter(torch.zeros(960))
    whole.grad = randn(960, seed=0)
    shard = whole.grad.chunk(size)[rank].clone()
    with Sent() as sent:
        norm = form([shard], 1.0)
    expected = nn.utils.clip_grad_norm_([whole], 1.0)
    same("the norm of 960 gradients", norm.to(expected.dtype), expected)
    same("its part of them, clipped", shard, whole.grad.chunk(size)[rank])
    sends(sent, "2(N-1)/N of one float64", 2 * (size - 1) / size * 8)
