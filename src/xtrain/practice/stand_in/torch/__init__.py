"""A stand-in for torch in the reader's browser: what the drills there need of it.

Tensors in pure Python, ranks by replay. What is not here is refused by name. It is on
the path in a page, and in the tests of it; nowhere else.
"""

import math
from typing import Any

from torch import autograd as autograd
from torch import base as base
from torch import distributed as distributed
from torch import dtypes as dtypes
from torch import nn as nn
from torch import tensors as tensors
from torch import utils as utils
from torch.base import Size, device
from torch.dtypes import (
    bfloat16,
    complex128,
    dtype,
    float16,
    float32,
    float64,
    int8,
    int32,
    int64,
    uint8,
)  # fmt: skip
from torch.dtypes import bool_ as bool
from torch.dtypes import promoted as promote_types
from torch.random import Generator, manual_seed, rand, randint, randn, randperm
from torch.tensors import (
    Tensor,
    cat,
    stack,
    tensor,
    where,
)  # fmt: skip
from torch.tensors import full as _full

autograd.install()
einsum = autograd.tracked(tensors.einsum, autograd.of_einsum)
STAND_IN = True
"""Tells this from torch."""
float, double, half = float32, float64, float16
long, int = int64, int32
inf, nan, pi = math.inf, math.nan, math.pi
concat = concatenate = cat
as_tensor = from_numpy = tensor
strided = "torch.strided"
__version__ = "stand-in"


def set_default_dtype(kind: dtype) -> None:
    dtypes.default = kind


def get_default_dtype() -> dtype:
    return dtypes.default


def get_default_device() -> device:
    return device("cpu")


def is_tensor(value: Any) -> Any:
    return isinstance(value, Tensor)


def set_num_threads(count: Any) -> None:
    """There is one."""


def use_deterministic_algorithms(mode: Any, warn_only: Any = False) -> None:
    """They are."""


def _shaped(shape: Any) -> Any:
    return base.flat_shape(shape)


def empty(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return tensors.empty(_shaped(shape), dtype)


def zeros(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return _full(_shaped(shape), 0, dtype or dtypes.default)


def ones(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return _full(_shaped(shape), 1, dtype or dtypes.default)


def full(shape: Any, fill_value: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return _full(shape, fill_value, dtype)


def empty_like(like: Tensor, dtype: Any = None, **_: Any) -> Tensor:
    return tensors.empty(like.shape, dtype or like.dtype)


def zeros_like(like: Tensor, dtype: Any = None, **_: Any) -> Tensor:
    return _full(like.shape, 0, dtype or like.dtype)


def ones_like(like: Tensor, dtype: Any = None, **_: Any) -> Tensor:
    return _full(like.shape, 1, dtype or like.dtype)


def full_like(like: Tensor, fill_value: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _full(like.shape, fill_value, dtype or like.dtype)


def arange(*limits: Any, dtype: Any = None, device: Any = None) -> Tensor:
    start, end, step = (0, *limits, 1)[-3:] if len(limits) < 3 else limits
    if len(limits) == 2:
        start, end, step = *limits, 1
    count = max(0, math.ceil((end - start) / step))
    return tensor([start + i * step for i in range(count)],
                  dtype or (int64 if count == 0 else None))  # fmt: skip


def linspace(start: Any, end: Any, steps: Any, dtype: Any = None) -> Tensor:
    return tensor([start + (end - start) * i / max(1, steps - 1) for i in range(steps)],
                  dtype or dtypes.default)  # fmt: skip


def eye(n: Any, dtype: Any = None) -> Tensor:
    rows = [[i == j for j in range(n)] for i in range(n)]
    return tensor(rows).to(dtype or dtypes.default)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(1) * b


def polar(size: Tensor, angle: Tensor) -> Tensor:
    return size * (angle * 1j).exp()


def complex(real: Tensor, imag: Tensor) -> Tensor:
    return real + imag * 1j


def equal(a: Tensor, b: Tensor) -> Any:
    return a.shape == b.shape and a.values() == b.values()


def allclose(a: Tensor, b: Tensor, rtol: Any = 1e-5, atol: Any = 1e-8) -> Any:
    return (a - b).abs().le(b.abs() * rtol + atol).all().item()


def broadcast_shapes(*shapes: Any) -> Size:
    return Size(base.broadcast_shape(*shapes))


def vstack(parts: Any) -> Tensor:
    return cat(list(parts), 0)


def cumsum(x: Tensor, dim: Any) -> Tensor:
    return x.cumsum(dim)


class no_grad:
    """Nothing here has gradients: a decorator and a block that do nothing."""

    def __init__(self, *_: Any):
        pass

    def __call__(self, function: Any) -> Any:
        return function

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


inference_mode = enable_grad = no_grad
WORDS = """
abs add all amax amin any argmax argmin argsort bincount bmm ceil chunk clamp clone cos
div dot exp flatten flip floor gather index_select isfinite isnan log log_softmax
logaddexp logsumexp matmul max maximum mean min minimum mm mul narrow nonzero norm numel
pow prod relu remainder repeat_interleave reshape round rsqrt scatter sigmoid sign sin
softmax sort split sqrt square squeeze std sub sum t tanh tensor_split topk transpose
tril triu unbind unflatten unique unsqueeze
"""
METHODS = frozenset(WORDS.split())
"""Functions that are methods of a tensor, too."""


def __getattr__(name: str) -> Any:
    if name in METHODS:
        return getattr(Tensor, name)
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"torch.{name} cannot be had in a page: use the command line's check"
    )


__all__ = [
    "stack",
    "Generator", "Size", "Tensor", "bfloat16", "bool", "complex128", "device", "dtype",
    "einsum", "float16", "float32", "float64", "int8", "int32", "int64", "manual_seed",
    "promote_types", "rand", "randint", "randn", "randperm", "uint8", "where",
]  # fmt: skip
