"""Views: other shapes of the same numbers."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch.base import Base, flat_shape, strides_of
from torch.dtypes import dtype, float64


class Views(Base):
    """They share the numbers: writing into a chunk writes into the whole."""

    def view(self, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], dtype):
            raise AttributeError("a view as another dtype cannot be had in a page")
        wanted = self.whole_shape(flat_shape(shape))
        if not self.is_contiguous():
            kept = [(n, s) for n, s in zip(self.shape, self.strides, strict=True)
                    if n != 1]  # fmt: skip
            if tuple(n for n in wanted if n != 1) == tuple(n for n, _ in kept):
                left = iter(kept)
                steps = [1 if n == 1 else next(left)[1] for n in wanted]
                return self.like(self.offset, wanted, steps)
            split = self.split_strides(wanted)
            if split is None:
                raise RuntimeError(
                    "view size is not compatible with input tensor's size and stride "
                    "(at least one dimension spans across two contiguous subspaces). "
                    "Use .reshape(...) instead."
                )
            return self.like(self.offset, wanted, split)
        return self.like(self.offset, wanted, strides_of(wanted))

    def split_strides(self, wanted: Sequence[int]) -> list[int] | None:
        """Strides of a view of which each dim lies in one of this; None if none has."""
        steps: list[int] = []
        left = list(wanted)
        for n, s in zip(self.shape, self.strides, strict=True):
            part, product_ = [], 1
            while left and product_ < n:
                product_ *= left[0]
                part.append(left.pop(0))
            if product_ != n:
                return None
            steps += [s * step for step in strides_of(part)]
        return None if any(n != 1 for n in left) else steps + [1] * len(left)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """With -1 worked out; RuntimeError if it has another number of elements."""
        known = math.prod(n for n in shape if n != -1)
        if shape.count(-1) == 1 and known and self.numel() % known == 0:
            shape = tuple(self.numel() // known if n == -1 else n for n in shape)
        if -1 in shape or math.prod(shape) != self.numel():
            raise RuntimeError(
                f"shape '{list(shape)}' is invalid for input of size {self.numel()}"
            )
        return shape

    def reshape(self, *shape: Any) -> Any:
        try:
            return self.view(*shape)
        except RuntimeError as problem:
            if "invalid" in str(problem):
                raise
            return self.clone().view(*shape)

    def view_as(self, other: Any) -> Any:
        return self.view(other.shape)

    def reshape_as(self, other: Any) -> Any:
        return self.reshape(other.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if not self.shape:
            return self.view(1)
        first, last = self.dim_of(start_dim), self.dim_of(end_dim)
        middle = math.prod(self.shape[first : last + 1])
        return self.reshape(*self.shape[:first], middle, *self.shape[last + 1 :])

    ravel = flatten

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        dim = self.dim_of(dim)
        sizes = list(sizes)
        if -1 in sizes:
            known = math.prod(n for n in sizes if n != -1)
            sizes[sizes.index(-1)] = self.shape[dim] // max(1, known)
        return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def narrow(self, dim: int, start: int, length: int) -> Any:
        dim = self.dim_of(dim)
        if start < 0 or length < 0 or start + length > self.shape[dim]:
            raise RuntimeError(
                f"start ({start}) + length ({length}) exceeds dimension size "
                f"({self.shape[dim]})."
            )
        shape = [*self.shape]
        shape[dim] = length
        return self.like(self.offset + start * self.strides[dim], shape, self.strides)

    def select(self, dim: int, index: int) -> Any:
        return self[(slice(None),) * self.dim_of(dim) + (index,)]

    def split(self, split_size: Any, dim: int = 0) -> tuple[Any, ...]:
        length = self.shape[self.dim_of(dim)]
        if isinstance(split_size, int):
            starts = range(0, max(length, 1), split_size)
            sizes = [min(split_size, length - at) for at in starts]
        else:
            sizes = list(map(int, split_size))
            if sum(sizes) != length:
                raise RuntimeError(
                    f"split_with_sizes expects split_sizes to sum exactly to {length} "
                    f"(input tensor's size at dimension {dim}), but got "
                    f"split_sizes={sizes}"
                )
        ends = list(accumulate(sizes))
        return tuple(
            self.narrow(dim, e - n, n) for e, n in zip(ends, sizes, strict=True)
        )

    split_with_sizes = split

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        length = self.shape[self.dim_of(dim)]
        return self.split(max(1, -(-length // chunks)), dim)

    def tensor_split(self, sections: Any, dim: int = 0) -> tuple[Any, ...]:
        length = self.shape[self.dim_of(dim)]
        if isinstance(sections, int):
            each, more = divmod(length, sections)
            return self.split([each + (i < more) for i in range(sections)], dim)
        edges = [0, *(min(int(i), length) for i in sections), length]
        pairs = zip(edges, edges[1:], strict=False)
        return tuple(self.narrow(dim, a, max(0, b - a)) for a, b in pairs)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        return tuple(self.select(dim, i) for i in range(self.shape[self.dim_of(dim)]))

    def unsqueeze(self, dim: int) -> Any:
        dim = self.dim_of(dim, 1)
        shape, steps = [*self.shape], [*self.strides]
        step = steps[dim] * shape[dim] if dim < len(shape) else 1
        shape.insert(dim, 1)
        steps.insert(dim, step)
        return self.like(self.offset, shape, steps)

    def squeeze(self, dim: int | None = None) -> Any:
        out = range(self.dim()) if dim is None else [self.dim_of(dim)]
        kept = [i for i in range(self.dim()) if i not in out or self.shape[i] != 1]
        shape, steps = ([of[i] for i in kept] for of in (self.shape, self.strides))
        return self.like(self.offset, shape, steps)

    def permute(self, *dims: Any) -> Any:
        order = [self.dim_of(d) for d in flat_shape(dims)]
        shape, steps = ([of[i] for i in order] for of in (self.shape, self.strides))
        return self.like(self.offset, shape, steps)

    def transpose(self, dim0: int, dim1: int) -> Any:
        order = list(range(self.dim()))
        a, b = self.dim_of(dim0), self.dim_of(dim1)
        order[a], order[b] = order[b], order[a]
        return self.permute(order) if order else self

    def t(self) -> Any:
        return self if self.dim() < 2 else self.transpose(0, 1)

    @property
    def T(self) -> Any:
        return self.permute(list(reversed(range(self.dim()))))

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    def expand(self, *shape: Any) -> Any:
        wanted = list(flat_shape(shape))
        own = [1] * (len(wanted) - self.dim()) + [*self.shape]
        steps = [0] * (len(wanted) - self.dim()) + [*self.strides]
        for i, (n, m) in enumerate(zip(own, wanted, strict=True)):
            if m == -1:
                wanted[i] = n
            elif n != m:
                if n != 1:
                    raise RuntimeError(
                        f"The expanded size of the tensor ({m}) must match the "
                        f"existing size ({n}) at non-singleton dimension {i}."
                    )
                steps[i] = 0
        return self.like(self.offset, wanted, steps)

    def expand_as(self, other: Any) -> Any:
        return self.expand(other.shape)

    def detach(self) -> Any:
        return self.like(self.offset, self.shape, self.strides)

    @property
    def data(self) -> Any:
        return self.detach()

    @property
    def real(self) -> Any:
        return self.made([v.real for v in self.values()], self.shape, float64)

    @property
    def imag(self) -> Any:
        return self.made([v.imag for v in self.values()], self.shape, float64)
