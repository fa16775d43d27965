"""Over dims: sums, orders, choices and products."""

import math
import operator
from collections.abc import Callable
from itertools import accumulate, product
from typing import Any

from torch import dtypes
from torch.base import Base, broadcast_shape, flat_shape
from torch.dtypes import bool_, dtype, int64, promoted, rounded
from torch.elements import Elements, log_of_sum


class Dims(Elements):
    """Each takes the numbers along one or more dims together."""

    def lines(self, dim: Any) -> tuple[list[list[Any]], list[int], list[int]]:
        """The numbers that a reduction takes together; the shapes without and with."""
        dims = range(self.dim()) if dim is None else dim
        dims = [dims] if isinstance(dims, int) else list(dims)
        dims = sorted({self.dim_of(d) for d in dims}) if self.shape else []
        kept = [d for d in range(self.dim()) if d not in dims]
        width = math.prod(self.shape[d] for d in dims)
        count = math.prod(self.shape[d] for d in kept)
        if dims == list(range(len(dims))):  # the first ones
            values = self.values()
            rows = [values[i::count] for i in range(count)]
        else:
            values = self.permute(kept + dims).values()
            rows = [values[i * width : (i + 1) * width] for i in range(count)]
        wide = [1 if d in dims else n for d, n in enumerate(self.shape)]
        return rows, [self.shape[d] for d in kept], wide

    def reduced(
        self, fn: Callable[[list[Any]], Any], dim: Any, keepdim: Any,
        kind: dtype | None = None,
    ) -> Any:  # fmt: skip
        rows, shape, wide = self.lines(dim)
        kind = kind or self.dtype
        values = rounded([fn(row) for row in rows], kind)
        return self.made(values, wide if keepdim else shape, kind)

    def sum(self, dim: Any = None, keepdim: Any = False, dtype: Any = None) -> Any:
        kind = dtype or (int64 if self.dtype.kind < dtypes.FLOAT else self.dtype)
        return self.reduced(sum, dim, keepdim, kind)

    def mean(self, dim: Any = None, keepdim: Any = False, dtype: Any = None) -> Any:
        total = self.to(dtype or self.dtype).sum(dim, keepdim)
        if not total.is_floating_point():
            raise RuntimeError("mean(): the input must be floating point")
        return total / (self.numel() / max(1, total.numel()))

    def prod(self, dim: Any = None, keepdim: Any = False) -> Any:
        return self.reduced(math.prod, dim, keepdim)

    def amax(self, dim: Any = None, keepdim: Any = False) -> Any:
        return self.reduced(largest, dim, keepdim)

    def amin(self, dim: Any = None, keepdim: Any = False) -> Any:
        return self.reduced(min, dim, keepdim)

    def all(self, dim: Any = None, keepdim: Any = False) -> Any:
        return self.reduced(all, dim, keepdim, bool_)

    def any(self, dim: Any = None, keepdim: Any = False) -> Any:
        return self.reduced(any, dim, keepdim, bool_)

    def argmax(self, dim: Any = None, keepdim: Any = False) -> Any:
        return self.reduced(lambda row: row.index(max(row)), dim, keepdim, int64)

    def argmin(self, dim: Any = None, keepdim: Any = False) -> Any:
        return self.reduced(lambda row: row.index(min(row)), dim, keepdim, int64)

    def max(self, dim: Any = None, keepdim: Any = False) -> Any:
        if isinstance(dim, Base):
            return self.with_(dim, max)
        if dim is None:
            return self.amax()
        return Pair((self.amax(dim, keepdim), self.argmax(dim, keepdim)))

    def min(self, dim: Any = None, keepdim: Any = False) -> Any:
        if isinstance(dim, Base):
            return self.with_(dim, min)
        if dim is None:
            return self.amin()
        return Pair((self.amin(dim, keepdim), self.argmin(dim, keepdim)))

    def norm(self, p: Any = 2, dim: Any = None, keepdim: Any = False) -> Any:
        return self.square().sum(dim, keepdim).sqrt()

    def var(self, dim: Any = None, correction: Any = 1) -> Any:
        mean = self.mean(dim, True)
        count = self.numel() // max(1, mean.numel())
        return (self - mean).square().sum(dim) / (count - correction)

    def std(self, dim: Any = None, correction: Any = 1) -> Any:
        return self.var(dim, correction).sqrt()

    def logsumexp(self, dim: Any, keepdim: Any = False) -> Any:
        return self.reduced(log_of_sum, dim, keepdim)

    def along(
        self, fn: Callable[[list[Any]], list[Any]], dim: Any, kind: dtype | None = None
    ) -> Any:
        """A function of each row of a dim that gives another row."""
        if not self.shape:
            return self.view(1).along(fn, 0, kind)[0]
        kind, moved = kind or self.dtype, self.transpose(dim, -1)
        width = moved.shape[-1]
        values = moved.values()
        rows = [
            fn(values[at : at + width]) for at in range(0, len(values), max(1, width))
        ]
        length = len(rows[0]) if rows else width
        found = [number for row in rows for number in row]
        shape = [*moved.shape[:-1], length]
        made = self.made(rounded(found, kind), shape, kind).transpose(dim, -1)
        return made.contiguous()

    def softmax(self, dim: Any, dtype: Any = None) -> Any:
        return self.to(dtype or self.dtype).along(soft, dim)

    def log_softmax(self, dim: Any) -> Any:
        return self - self.logsumexp(dim, True)

    def cumsum(self, dim: Any = 0) -> Any:
        kind = int64 if self.dtype.kind < dtypes.FLOAT else self.dtype
        return self.along(lambda row: list(accumulate(row)), dim, kind)

    def flip(self, *dims: Any) -> Any:
        found = self
        for dim in flat_shape(dims):
            found = found.along(lambda row: row[::-1], dim)
        return found

    def argsort(
        self, dim: Any = -1, descending: Any = False, stable: Any = False
    ) -> Any:
        return self.along(lambda row: in_order(row, descending), dim, int64)

    def sort(self, dim: Any = -1, descending: Any = False, stable: Any = False) -> Any:
        order = self.argsort(dim, descending)
        return Pair((self.gather(dim, order), order))

    def topk(
        self, k: Any, dim: Any = -1, largest: Any = True, sorted: Any = True
    ) -> Any:
        order = self.along(lambda row: in_order(row, largest)[:k], dim, int64)
        return Pair((self.gather(dim, order), order))

    def gather(self, dim: int, index: Any) -> Any:
        places = self.chosen_places(dim, index)
        return self.made(
            [self.storage.data[place] for place in places], index.shape, self.dtype
        )

    def chosen_places(self, dim: int, index: Any) -> list[int]:
        """Where the elements are that an index names along a dim."""
        dim, found = self.dim_of(dim), []
        for place, chosen in zip(
            product(*map(range, index.shape)), index.values(), strict=True
        ):
            if not 0 <= chosen < self.shape[dim]:
                raise RuntimeError(
                    f"index {chosen} is out of bounds for dimension {dim} with size "
                    f"{self.shape[dim]}"
                )
            at = sum(i * s for i, s in zip(place, self.strides, strict=True))
            found.append(self.offset + at + (chosen - place[dim]) * self.strides[dim])
        return found

    def scatter_(self, dim: int, index: Any, src: Any) -> Any:
        values = source_of(src, index)
        for place, value in zip(self.chosen_places(dim, index), values, strict=True):
            self.storage.data[place] = rounded([value], self.dtype)[0]
        return self

    def scatter_add_(self, dim: int, index: Any, src: Any) -> Any:
        values = source_of(src, index)
        for place, value in zip(self.chosen_places(dim, index), values, strict=True):
            total = self.storage.data[place] + value
            self.storage.data[place] = rounded([total], self.dtype)[0]
        return self

    def scatter(self, dim: int, index: Any, src: Any) -> Any:
        return self.clone().scatter_(dim, index, src)

    def scatter_add(self, dim: int, index: Any, src: Any) -> Any:
        return self.clone().scatter_add_(dim, index, src)

    def index_add_(self, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
        for i, chosen in enumerate(index.values()):
            self.select(dim, chosen).add_(source.select(dim, i), alpha=alpha)
        return self

    def index_add(self, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
        return self.clone().index_add_(dim, index, source, alpha)

    def index_copy_(self, dim: int, index: Any, source: Any) -> Any:
        for i, chosen in enumerate(index.values()):
            self.select(dim, chosen).copy_(source.select(dim, i))
        return self

    def index_fill_(self, dim: int, index: Any, value: Any) -> Any:
        for chosen in index.values():
            self.select(dim, chosen).fill_(value)
        return self

    def nonzero(self) -> Any:
        pairs = zip(product(*map(range, self.shape)), self.values(), strict=True)
        found = [list(place) for place, value in pairs if value]
        values = [n for place in found for n in place]
        return self.made(values, (len(found), self.dim()), int64)

    def bincount(self, minlength: int = 0) -> Any:
        counts = [0] * max(minlength, max(self.values(), default=-1) + 1)
        for value in self.values():
            counts[value] += 1
        return self.made(counts, (len(counts),), int64)

    def unique(self) -> Any:
        found = sorted(set(self.values()))
        return self.made(found, (len(found),), self.dtype)

    def triu(self, diagonal: int = 0) -> Any:
        return self.kept_where(lambda row, col: col - row >= diagonal)

    def tril(self, diagonal: int = 0) -> Any:
        return self.kept_where(lambda row, col: col - row <= diagonal)

    def kept_where(self, test: Callable[[int, int], Any]) -> Any:
        rows, cols = self.shape[-2:]
        mask = [test(r, c) for r in range(rows) for c in range(cols)]
        kept = self.made(mask, (rows, cols), bool_)
        return self.with_(kept, lambda v, m: v if m else 0, self.dtype)

    def matmul(self, other: Any) -> Any:
        if self.dim() == 1 and other.dim() == 1:
            return self.dot(other)
        if self.dim() == 1:
            return self.unsqueeze(0).matmul(other).squeeze(-2)
        if other.dim() == 1:
            return self.matmul(other.unsqueeze(1)).squeeze(-1)
        if self.shape[-1] != other.shape[-2]:
            shapes = "x".join(map(str, self.shape)), "x".join(map(str, other.shape))
            raise RuntimeError(
                f"mat1 and mat2 shapes cannot be multiplied ({' and '.join(shapes)})"
            )
        batch = broadcast_shape(self.shape[:-2], other.shape[:-2])
        rows, inner, cols = self.shape[-2], self.shape[-1], other.shape[-1]
        a = self.expand(*batch, rows, inner).values()
        b = other.mT.expand(*batch, cols, inner).values()
        found: list[Any] = []
        for one in range(math.prod(batch)):
            left = [
                a[at : at + inner]
                for at in range(one * rows * inner, (one + 1) * rows * inner, inner)
            ] if inner else [[]] * rows  # fmt: skip
            right = [
                b[at : at + inner]
                for at in range(one * cols * inner, (one + 1) * cols * inner, inner)
            ] if inner else [[]] * cols  # fmt: skip
            found += [sum(map(operator.mul, x, y)) for x in left for y in right]
        kind = promoted(self.dtype, other.dtype)
        return self.made(rounded(found, kind), (*batch, rows, cols), kind)

    mm = bmm = matmul

    def dot(self, other: Any) -> Any:
        return (self * other).sum()

    def __matmul__(self, other: Any) -> Any:
        return self.matmul(other)


class Pair(tuple[Any, ...]):
    """Values and where they were."""

    @property
    def values(self) -> Any:
        return self[0]

    @property
    def indices(self) -> Any:
        return self[1]


def source_of(src: Any, index: Any) -> list[Any]:
    """What goes to the places of an index: a tensor's numbers, or one for all."""
    if not isinstance(src, Base):
        return [src] * index.numel()
    return src[tuple(slice(n) for n in index.shape)].values()


def largest(row: list[Any]) -> Any:
    """NaN if one is NaN."""
    return math.nan if any(v != v for v in row) else max(row)


def soft(row: list[float]) -> list[float]:
    top = max(row)
    parts = [math.exp(v - top) if top != -math.inf else math.nan for v in row]
    total = sum(parts)
    return [part / total for part in parts]


def in_order(row: list[Any], descending: Any) -> list[int]:
    return sorted(range(len(row)), key=row.__getitem__, reverse=bool(descending))
