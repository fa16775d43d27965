"""Functions of torch.nn.functional that files of the drills call."""

import math
from typing import Any

from torch.tensors import Tensor, full


def softmax(x: Tensor, dim: int = -1, dtype: Any = None) -> Tensor:
    return x.softmax(dim, dtype)


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def relu(x: Tensor) -> Tensor:
    return x.relu()


def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = x @ weight.T
    return found if bias is None else found + bias


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    found = full((*index.shape, num_classes), 0)
    return found.scatter_(-1, index.unsqueeze(-1), 1)


def pad(x: Tensor, sizes: Any, mode: str = "constant", value: float = 0) -> Tensor:
    found = x
    for i in range(0, len(sizes), 2):
        before, after = sizes[i : i + 2]
        dim = x.dim() - 1 - i // 2
        shape = [*found.shape]
        shape[dim] += before + after
        wider = full(shape, value, x.dtype)
        wider.narrow(dim, before, found.shape[dim]).copy_(found)
        found = wider
    return found


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = full(scores.shape[-2:], -math.inf, scores.dtype).triu(1)
        scores = scores + hidden
    return scores.softmax(-1) @ v
