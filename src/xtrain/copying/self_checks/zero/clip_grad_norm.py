"""The norm and the clipped shards are those of torch's function on all gradients."""

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.zero.clip_grad_norm import clip_grad_norm


def check(rank: int, size: int) -> None:
    whole = nn.Parameter(torch.zeros(1000))
    whole.grad = randn(1000, seed=0)
    shard = whole.grad.chunk(size)[rank].clone()
    with Sent() as sent:
        norm = clip_grad_norm([shard], 1.0)
    expected = nn.utils.clip_grad_norm_([whole], 1.0)
    same("the norm of 1,000 gradients", norm.float(), expected)
    same("a quarter of them, clipped", shard, whole.grad.chunk(size)[rank])
    sends(sent, "2(N-1)/N of 8 bytes", 2 * (size - 1) / size * 8)
