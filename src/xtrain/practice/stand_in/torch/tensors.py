"""Tensors in pure Python, and how they are made.

Slow, and meant for a few thousand numbers.

    Base      what it is, its numbers       Elements   element by element
    Views     other shapes of them          Dims       over dims, products
    Parts     reading and writing parts     Tensor     copies
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

from torch import dtypes
from torch.base import (
    MOST,
    Storage,
    broadcast_shape,
    flat_shape,
    strides_of,
)
from torch.dims import Dims
from torch.dtypes import bool_, dtype, float64, int64, promoted, rounded
from torch.elements import tensor_kind, with_number


class Tensor(Dims):
    """Numbers of one dtype in a shape."""

    __slots__ = ()

    def clone(self) -> "Tensor":
        return of_values(self.values(), self.shape, self.dtype)

    def contiguous(self) -> "Tensor":
        return self if self.is_contiguous() else self.clone()

    def to(self, *args: Any, **kwargs: Any) -> "Tensor":
        kinds = [a for a in (*args, *kwargs.values()) if isinstance(a, dtype | Tensor)]
        kind = kinds[0] if kinds else self.dtype
        kind = kind.dtype if isinstance(kind, Tensor) else kind
        if kind is self.dtype:
            return self.clone() if kwargs.get("copy") else self
        return of_values(rounded(self.values(), kind), self.shape, kind)

    def type(self, kind: dtype) -> "Tensor":
        return self.to(kind)

    def type_as(self, other: "Tensor") -> "Tensor":
        return self.to(other.dtype)

    def float(self) -> "Tensor":
        return self.to(dtypes.float32)

    def half(self) -> "Tensor":
        return self.to(dtypes.float16)

    def double(self) -> "Tensor":
        return self.to(float64)

    def long(self) -> "Tensor":
        return self.to(int64)

    def int(self) -> "Tensor":
        return self.to(dtypes.int32)

    def bool(self) -> "Tensor":
        return self.to(bool_)

    def cpu(self) -> "Tensor":
        return self

    def copy_(self, other: Any, non_blocking: Any = False) -> "Tensor":
        if not isinstance(other, Tensor):
            return self.fill_(other)
        source = other if other.shape == self.shape else other.expand(self.shape)
        values = source.values()
        self.write(values if other.dtype is self.dtype else rounded(values, self.dtype))
        return self

    def fill_(self, value: Any) -> "Tensor":
        value = value.item() if isinstance(value, Tensor) else value
        self.write(rounded([value], self.dtype) * self.numel())
        return self

    def zero_(self) -> "Tensor":
        return self.fill_(0)

    def new_empty(self, *shape: Any, dtype: Any = None, device: Any = None) -> "Tensor":
        return empty(flat_shape(shape), dtype or self.dtype)

    def new_zeros(self, *shape: Any, dtype: Any = None, device: Any = None) -> "Tensor":
        return full(flat_shape(shape), 0, dtype or self.dtype)

    def new_ones(self, *shape: Any, dtype: Any = None, device: Any = None) -> "Tensor":
        return full(flat_shape(shape), 1, dtype or self.dtype)

    def new_full(
        self, shape: Any, fill_value: Any, dtype: Any = None, device: Any = None
    ) -> "Tensor":
        return full(shape, fill_value, dtype or self.dtype)

    def new_tensor(self, data: Any, dtype: Any = None) -> "Tensor":
        return tensor(data, dtype or self.dtype)

    def repeat(self, *times: Any) -> "Tensor":
        counts = flat_shape(times)
        own = self.reshape([1] * (len(counts) - self.dim()) + [*self.shape])
        for dim, count in enumerate(counts):
            own = cat([own] * count, dim) if count else own.narrow(dim, 0, 0)
        return own if own.storage is not self.storage else own.clone()

    def repeat_interleave(self, repeats: Any, dim: Any = None) -> "Tensor":
        if dim is None:
            return self.flatten().repeat_interleave(repeats, 0)
        dim = self.dim_of(dim)
        length = self.shape[dim]
        counts = repeats.tolist() if isinstance(repeats, Tensor) else repeats
        counts = [counts] * length if isinstance(counts, int) else list(counts)
        chosen = [i for i, count in enumerate(counts) for _ in range(count)]
        return self.index_select(dim, chosen)

    def index_select(self, dim: int, index: Any) -> "Tensor":
        chosen = index.values() if isinstance(index, Tensor) else list(index)
        dim = self.dim_of(dim)
        return self[(slice(None),) * dim + (tensor(chosen, int64),)]


def of_values(values: list[Any], shape: Sequence[int], kind: dtype) -> "Tensor":
    """A new tensor of numbers that its dtype has."""
    if len(values) > MOST:
        raise MemoryError(f"a tensor of {len(values):,} numbers; {MOST:,} are allowed")
    return Tensor(Storage(values), 0, shape, strides_of(shape), kind)


def tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Of numbers in lists."""
    if isinstance(data, Tensor):
        return data.clone().to(dtype or data.dtype)
    shape, values = shape_of(data)
    if dtype is None:
        dtype = dtypes.default
        if values and all(isinstance(v, bool) for v in values):
            dtype = bool_
        elif values and all(isinstance(v, int) for v in values):
            dtype = int64
        elif any(isinstance(v, complex) for v in values):
            dtype = dtypes.complex128
    return of_values(rounded(values, dtype), shape, dtype)


def shape_of(data: Any) -> tuple[list[int], list[Any]]:
    if isinstance(data, Tensor):
        return [*data.shape], data.values()
    if not isinstance(data, list | tuple | range):
        return [], [data]
    parts = [shape_of(part) for part in data]
    if any(shape != parts[0][0] for shape, _ in parts):
        raise ValueError("expected sequences of equal length")
    values = [value for _, found in parts for value in found]
    return [len(parts), *(parts[0][0] if parts else [])], values


def full(shape: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    """One number everywhere."""
    shape = (shape,) if isinstance(shape, int) else tuple(map(int, shape))
    if isinstance(fill_value, Tensor):
        dtype, fill_value = dtype or fill_value.dtype, fill_value.item()
    if dtype is None:
        dtype = with_number(bool_, fill_value)
        dtype = bool_ if isinstance(fill_value, bool) else dtype
    if math.prod(shape) > MOST:
        raise MemoryError(
            f"a tensor of {math.prod(shape):,} numbers; {MOST:,} are allowed"
        )
    return of_values(rounded([fill_value], dtype) * math.prod(shape), shape, dtype)


def empty(shape: Any, dtype: Any = None) -> Tensor:
    """NaN everywhere: who reads it before writing sees that."""
    dtype = dtype or dtypes.default
    return full(shape, math.nan if dtype.kind >= dtypes.FLOAT else
                dtype.kind == dtypes.INTEGER and 2 ** (8 * dtype.itemsize - 1) - 1,
                dtype)  # fmt: skip


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """One after the other along a dim."""
    tensors = [t for t in tensors if t.shape != (0,)] or list(tensors)[:1]
    first = tensors[0]
    dim = first.dim_of(dim)
    for other in tensors:
        if [*other.shape[:dim], *other.shape[dim + 1 :]] != [
            *first.shape[:dim], *first.shape[dim + 1 :],
        ]:  # fmt: skip
            raise RuntimeError(
                f"Sizes of tensors must match except in dimension {dim}: "
                f"{[*first.shape]} and {[*other.shape]}"
            )
    kind = first.dtype
    for other in tensors:
        kind = promoted(kind, other.dtype)
    shape = [*first.shape]
    shape[dim] = sum(t.shape[dim] for t in tensors)
    if dim == 0:
        values = [v for t in tensors for v in t.values()]
        return of_values(rounded(values, kind), shape, kind)
    made = full(shape, 0, kind)
    at = 0
    for part in tensors:
        made.narrow(dim, at, part.shape[dim]).copy_(part)
        at += part.shape[dim]
    return made


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Along a new dim."""
    return cat([t.unsqueeze(dim) for t in tensors], dim)


def where(mask: Tensor, a: Any, b: Any) -> Tensor:
    """`a` where the mask holds, `b` elsewhere."""
    a, b = (x if isinstance(x, Tensor) else tensor(x) for x in (a, b))
    shape = broadcast_shape(mask.shape, a.shape, b.shape)
    parts = [t.expand(shape).values() for t in (mask, a, b)]
    kind = tensor_kind(a, b)
    values = [x if m else y for m, x, y in zip(*parts, strict=True)]
    return of_values(rounded(values, kind), shape, kind)


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Sums of products over the letters that the result lacks."""
    left, _, right = equation.replace(" ", "").partition("->")
    letters = left.split(",")
    sizes: dict[str, int] = {}
    for names, operand in zip(letters, operands, strict=True):
        sizes |= dict(zip(names, operand.shape, strict=True))
    summed = [n for n in sizes if n not in right]
    kind = operands[0].dtype
    every = []
    for names, operand in zip(letters, operands, strict=True):
        kind = promoted(kind, operand.dtype)
        steps = dict(zip(names, operand.strides, strict=True))
        shape = [sizes[n] for n in [*right, *summed]]
        strides = [steps.get(n, 0) for n in [*right, *summed]]
        view = Tensor(operand.storage, operand.offset, shape, strides, operand.dtype)
        every.append(view.values())
    products = every[0]
    for numbers in every[1:]:
        products = list(map(operator.mul, products, numbers))
    shape = [sizes[n] for n in right]
    width = math.prod(sizes[n] for n in summed)
    values = [
        sum(products[at : at + width]) for at in range(0, len(products), max(1, width))
    ]
    return of_values(rounded(values, kind), shape, kind)
