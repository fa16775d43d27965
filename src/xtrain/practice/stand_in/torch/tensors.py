"""Tensors in pure Python: a list of numbers, and views of it with shape and strides.

What a view shares, it shares here: writing into a chunk writes into the whole. Slow,
and meant for a few thousand numbers.
"""

import cmath
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any

from torch import dtypes
from torch.dtypes import bool_, dtype, float64, int64, promoted, rounded

MOST = 1 << 20
"""Numbers that a tensor may have."""


class Storage:
    """The numbers that some tensors are views of."""

    __slots__ = ("data",)

    def __init__(self, data: list[Any]):
        self.data = data


class Size(tuple[int, ...]):
    """A shape."""

    def numel(self) -> int:
        return math.prod(self)

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


class device:
    """The only one there is."""

    def __init__(self, kind: Any = "cpu", index: int | None = None):
        self.type, self.index = str(kind).partition(":")[0], index
        if self.type != "cpu":
            raise RuntimeError(f"there is no device {kind!s} in a page")

    def __repr__(self) -> str:
        return "device(type='cpu')"

    def __str__(self) -> str:
        return "cpu"

    def __eq__(self, other: object) -> bool:
        return str(other) == "cpu"

    def __hash__(self) -> int:
        return hash("cpu")


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose numbers lie in a row."""
    steps = accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(reversed(list(steps))) if shape else ()


def of_values(values: list[Any], shape: Sequence[int], kind: dtype) -> "Tensor":
    """A new tensor of numbers that its dtype has."""
    if len(values) > MOST:
        raise MemoryError(f"a tensor of {len(values):,} numbers; {MOST:,} are allowed")
    return Tensor(Storage(values), 0, shape, strides_of(shape), kind)


def flat_shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """`view(2, 3)` and `view((2, 3))` alike."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    return tuple(map(int, shape))


class Tensor:
    """Numbers of one dtype in a shape."""

    __slots__ = ("dtype", "grad", "offset", "requires_grad", "shape", "storage",
                 "strides", "watched")  # fmt: skip

    def __init__(
        self, storage: Storage, offset: int, shape: Sequence[int],
        strides: Sequence[int], kind: dtype,
    ):  # fmt: skip
        self.storage, self.offset, self.dtype = storage, offset, kind
        self.shape, self.strides = Size(shape), tuple(strides)
        self.requires_grad, self.grad = False, None

    # -- what it is --------------------------------------------------------------------

    device = device("cpu")
    is_cpu, is_cuda, is_meta, is_leaf = True, False, False, True
    layout = "torch.strided"

    def numel(self) -> int:
        return math.prod(self.shape)

    nelement = numel

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def storage_offset(self) -> int:
        return self.offset

    def data_ptr(self) -> int:
        return id(self.storage) + self.offset * self.itemsize

    def is_contiguous(self) -> bool:
        wanted = strides_of(self.shape)
        pairs = zip(self.shape, self.strides, wanted, strict=True)
        return not self.numel() or all(n == 1 or s == w for n, s, w in pairs)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator["Tensor"]:
        return (self[i] for i in range(len(self)))

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tensor":
        kept = memo.setdefault(id(self.storage), Storage(list(self.storage.data)))
        return Tensor(kept, self.offset, self.shape, self.strides, self.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"tensors in a page have no `{name}`: see check on the "
                             f"command line")  # fmt: skip

    # -- its numbers -------------------------------------------------------------------

    def places(self) -> Sequence[int]:
        """Where in the storage its numbers are, row by row."""
        if self.is_contiguous():
            return range(self.offset, self.offset + self.numel())
        found = [self.offset]
        for length, step in zip(self.shape, self.strides, strict=True):
            steps = range(0, length * step, step) if step else [0] * length
            found = [place + more for place in found for more in steps]
        return found

    def values(self) -> list[Any]:
        """Its numbers, row by row."""
        data = self.storage.data
        if self.is_contiguous():
            return data[self.offset : self.offset + self.numel()]
        return [data[place] for place in self.places()]

    def write(self, values: Sequence[Any]) -> None:
        """Put numbers into it, row by row."""
        if len(values) != self.numel():
            raise RuntimeError(f"{len(values)} numbers for {self.numel()}")
        data = self.storage.data
        if self.is_contiguous():
            data[self.offset : self.offset + len(values)] = values
        else:
            for place, value in zip(self.places(), values, strict=True):
                data[place] = value

    def item(self) -> Any:
        if self.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {self.numel()} elements cannot be converted to Scalar"
            )
        return self.storage.data[self.offset]

    def tolist(self) -> Any:
        if not self.shape:
            return self.item()
        if self.dim() == 1:
            return self.values()
        return [row.tolist() for row in self]

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError(
                "Boolean value of Tensor with more than one value is ambiguous"
            )
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind > dtypes.INTEGER:
            raise TypeError("only integer tensors can be converted to an index")
        return int(self.item())

    def __repr__(self) -> str:
        kind = "" if self.dtype in (float64, int64, bool_) else f", dtype={self.dtype}"
        return f"tensor({short(self.tolist())}{kind})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.shape else str(self)

    # -- views -------------------------------------------------------------------------

    def like(
        self, offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> "Tensor":
        return Tensor(self.storage, offset, shape, strides, self.dtype)

    def dim_of(self, dim: int, extra: int = 0) -> int:
        """A dim from 0 on; IndexError as torch's."""
        count = self.dim() + extra
        if not -max(1, count) <= dim < max(1, count):
            raise IndexError(
                f"Dimension out of range (expected to be in range of "
                f"[{-count}, {count - 1}], but got {dim})"
            )
        return dim % max(1, count)

    def view(self, *shape: Any) -> "Tensor":
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

    def reshape(self, *shape: Any) -> "Tensor":
        try:
            return self.view(*shape)
        except RuntimeError as problem:
            if "invalid" in str(problem):
                raise
            return self.clone().view(*shape)

    def view_as(self, other: "Tensor") -> "Tensor":
        return self.view(other.shape)

    def reshape_as(self, other: "Tensor") -> "Tensor":
        return self.reshape(other.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "Tensor":
        if not self.shape:
            return self.view(1)
        first, last = self.dim_of(start_dim), self.dim_of(end_dim)
        middle = math.prod(self.shape[first : last + 1])
        return self.reshape(*self.shape[:first], middle, *self.shape[last + 1 :])

    ravel = flatten

    def unflatten(self, dim: int, sizes: Sequence[int]) -> "Tensor":
        dim = self.dim_of(dim)
        sizes = list(sizes)
        if -1 in sizes:
            known = math.prod(n for n in sizes if n != -1)
            sizes[sizes.index(-1)] = self.shape[dim] // max(1, known)
        return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def narrow(self, dim: int, start: int, length: int) -> "Tensor":
        dim = self.dim_of(dim)
        if start < 0 or length < 0 or start + length > self.shape[dim]:
            raise RuntimeError(
                f"start ({start}) + length ({length}) exceeds dimension size "
                f"({self.shape[dim]})."
            )
        shape = [*self.shape]
        shape[dim] = length
        return self.like(self.offset + start * self.strides[dim], shape, self.strides)

    def select(self, dim: int, index: int) -> "Tensor":
        return self[(slice(None),) * self.dim_of(dim) + (index,)]

    def split(self, split_size: Any, dim: int = 0) -> tuple["Tensor", ...]:
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

    def chunk(self, chunks: int, dim: int = 0) -> tuple["Tensor", ...]:
        length = self.shape[self.dim_of(dim)]
        return self.split(max(1, -(-length // chunks)), dim)

    def tensor_split(self, sections: Any, dim: int = 0) -> tuple["Tensor", ...]:
        length = self.shape[self.dim_of(dim)]
        if isinstance(sections, int):
            each, more = divmod(length, sections)
            return self.split([each + (i < more) for i in range(sections)], dim)
        edges = [0, *(min(int(i), length) for i in sections), length]
        pairs = zip(edges, edges[1:], strict=False)
        return tuple(self.narrow(dim, a, max(0, b - a)) for a, b in pairs)

    def unbind(self, dim: int = 0) -> tuple["Tensor", ...]:
        return tuple(self.select(dim, i) for i in range(self.shape[self.dim_of(dim)]))

    def unsqueeze(self, dim: int) -> "Tensor":
        dim = self.dim_of(dim, 1)
        shape, steps = [*self.shape], [*self.strides]
        step = steps[dim] * shape[dim] if dim < len(shape) else 1
        shape.insert(dim, 1)
        steps.insert(dim, step)
        return self.like(self.offset, shape, steps)

    def squeeze(self, dim: int | None = None) -> "Tensor":
        out = range(self.dim()) if dim is None else [self.dim_of(dim)]
        kept = [i for i in range(self.dim()) if i not in out or self.shape[i] != 1]
        shape, steps = ([of[i] for i in kept] for of in (self.shape, self.strides))
        return self.like(self.offset, shape, steps)

    def permute(self, *dims: Any) -> "Tensor":
        order = [self.dim_of(d) for d in flat_shape(dims)]
        shape, steps = ([of[i] for i in order] for of in (self.shape, self.strides))
        return self.like(self.offset, shape, steps)

    def transpose(self, dim0: int, dim1: int) -> "Tensor":
        order = list(range(self.dim()))
        a, b = self.dim_of(dim0), self.dim_of(dim1)
        order[a], order[b] = order[b], order[a]
        return self.permute(order) if order else self

    def t(self) -> "Tensor":
        return self if self.dim() < 2 else self.transpose(0, 1)

    @property
    def T(self) -> "Tensor":
        return self.permute(list(reversed(range(self.dim()))))

    @property
    def mT(self) -> "Tensor":
        return self.transpose(-2, -1)

    def expand(self, *shape: Any) -> "Tensor":
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

    def expand_as(self, other: "Tensor") -> "Tensor":
        return self.expand(other.shape)

    def detach(self) -> "Tensor":
        return self.like(self.offset, self.shape, self.strides)

    @property
    def data(self) -> "Tensor":
        return self.detach()

    @property
    def real(self) -> "Tensor":
        return of_values([v.real for v in self.values()], self.shape, float64)

    @property
    def imag(self) -> "Tensor":
        return of_values([v.imag for v in self.values()], self.shape, float64)

    # -- copies ------------------------------------------------------------------------

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

    def requires_grad_(self, wanted: Any = True) -> "Tensor":
        self.requires_grad = wanted
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

    # -- reading and writing parts -----------------------------------------------------

    def __getitem__(self, index: Any) -> "Tensor":
        view, chosen = self.basic(index)
        if not chosen:
            return view
        places, shape = view.advanced(chosen)
        data = self.storage.data
        return of_values([data[place] for place in places], shape, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        view, chosen = self.basic(index)
        if not chosen:
            view.copy_(value)
            return
        places, shape = view.advanced(chosen)
        source = value if isinstance(value, Tensor) else tensor(value, self.dtype)
        values = rounded(source.expand(shape).values(), self.dtype)
        for place, number in zip(places, values, strict=True):
            self.storage.data[place] = number

    def basic(self, index: Any) -> tuple["Tensor", dict[int, "Tensor"]]:
        """The view of the parts that are numbers and slices; of the rest, by dim."""
        parts = list(index) if isinstance(index, tuple) else [index]
        parts = [tensor(p) if isinstance(p, list | range) else p for p in parts]
        used = sum(
            p.dim() if isinstance(p, Tensor) and p.dtype is bool_ else 1
            for p in parts if p is not None and p is not ...
        )  # fmt: skip
        if used > self.dim():
            raise IndexError(f"too many indices for tensor of dimension {self.dim()}")
        if ... not in [p for p in parts if not isinstance(p, Tensor)]:
            parts.append(...)
        place = next(i for i, p in enumerate(parts) if p is ...)
        parts[place : place + 1] = [slice(None)] * (self.dim() - used)
        offset, shape, steps, at = self.offset, [], [], 0
        chosen: dict[int, Tensor] = {}
        for part in parts:
            if part is None:
                shape.append(1)
                steps.append(1)
                continue
            if isinstance(part, Tensor) and (part.dim() or part.dtype is bool_):
                for one in part.nonzero().unbind(1) if part.dtype is bool_ else [part]:
                    chosen[len(shape)] = one
                    shape.append(self.shape[at])
                    steps.append(self.strides[at])
                    at += 1
                continue
            length, step = self.shape[at], self.strides[at]
            at += 1
            if isinstance(part, slice):
                first, last, stride = part.indices(length)
                if stride < 0:
                    raise ValueError("step must be greater than zero")
                offset += first * step
                shape.append(max(0, -(-(last - first) // stride)))
                steps.append(step * stride)
                continue
            number = operator.index(part)
            if not -length <= number < length:
                raise IndexError(
                    f"index {number} is out of bounds for dimension {at - 1} with "
                    f"size {length}"
                )
            offset += number % length * step
        return self.like(offset, shape, steps), chosen

    def advanced(self, chosen: dict[int, "Tensor"]) -> tuple[list[int], list[int]]:
        """Where the elements are that index tensors choose, and their shape."""
        common = broadcast_shape(*(t.shape for t in chosen.values()))
        numbers = [t.expand(common).values() for t in chosen.values()]
        for dim, found in zip(chosen, numbers, strict=True):
            for number in found:
                if not -self.shape[dim] <= number < self.shape[dim]:
                    raise IndexError(
                        f"index {number} is out of bounds for dimension {dim} with "
                        f"size {self.shape[dim]}"
                    )
        sums = [
            sum(n % self.shape[d] * self.strides[d]
                for d, n in zip(chosen, each, strict=True))
            for each in zip(*numbers, strict=True)
        ]  # fmt: skip
        dims = sorted(chosen)
        joined = dims == list(range(dims[0], dims[-1] + 1))
        rest = [d for d in range(self.dim()) if d not in chosen]
        before = [d for d in rest if joined and d < dims[0]]
        after = [d for d in rest if d not in before]

        def offsets(kept: list[int]) -> list[int]:
            shape, steps = ([of[d] for d in kept] for of in (self.shape, self.strides))
            return list(Tensor(self.storage, 0, shape, steps, self.dtype).places())

        tail = offsets(after)
        places = [
            self.offset + a + b + c for a in offsets(before) for b in sums for c in tail
        ]
        shape = [self.shape[d] for d in before] + [*common]
        return places, shape + [self.shape[d] for d in after]

    # -- element by element ------------------------------------------------------------

    def each(self, fn: Callable[[Any], Any], kind: dtype | None = None) -> "Tensor":
        kind = kind or self.dtype
        return of_values(rounded(map_list(fn, self.values()), kind), self.shape, kind)

    def floats(self, fn: Callable[[Any], Any]) -> "Tensor":
        """A function whose results are no integers."""
        kind = self.dtype if self.dtype.kind >= dtypes.FLOAT else dtypes.default
        return self.each(fn, kind)

    def with_(
        self, other: Any, fn: Callable[[Any, Any], Any], kind: dtype | None = None,
        swapped: Any = False,
    ) -> "Tensor":  # fmt: skip
        """`fn` of each element and of that of another tensor, or of a number."""
        if not isinstance(other, Tensor):
            if not isinstance(other, int | float | complex):
                return NotImplemented
            kind = kind or with_number(self.dtype, other)
            if swapped:
                values = [fn(other, value) for value in self.values()]
            else:
                values = [fn(value, other) for value in self.values()]
            return of_values(rounded(values, kind), self.shape, kind)
        a, b = (other, self) if swapped else (self, other)
        kind = kind or tensor_kind(a, b)
        shape: Sequence[int] = a.shape
        if a.shape != b.shape:
            shape = broadcast_shape(a.shape, b.shape)
            a, b = a.expand(shape), b.expand(shape)
        values = list(map(fn, a.values(), b.values()))
        return of_values(rounded(values, kind), shape, kind)

    def put(self, found: "Tensor") -> "Tensor":
        """In place: the result of an operation of this tensor."""
        if found is NotImplemented:
            raise TypeError("an operand is neither a tensor nor a number")
        if found.shape != self.shape:
            raise RuntimeError(
                f"output with shape {list(self.shape)} doesn't match the broadcast "
                f"shape {list(found.shape)}"
            )
        if found.dtype.kind > self.dtype.kind:
            raise RuntimeError(
                f"result type {found.dtype.name} can't be cast to the desired output "
                f"type {self.dtype.name}"
            )
        return self.copy_(found)

    def add(self, other: Any, alpha: Any = 1) -> "Tensor":
        return self + (other * alpha if alpha != 1 else other)

    def sub(self, other: Any, alpha: Any = 1) -> "Tensor":
        return self - (other * alpha if alpha != 1 else other)

    def div(self, other: Any, rounding_mode: Any = None) -> "Tensor":
        if rounding_mode == "floor":
            return self // other
        return self / other if rounding_mode is None else (self / other).trunc()

    def lerp(self, end: Any, weight: Any) -> "Tensor":
        return self + (end - self) * weight

    def addcmul_(self, a: Any, b: Any, value: Any = 1) -> "Tensor":
        return self.put(self + a * b * value)

    def addcdiv_(self, a: Any, b: Any, value: Any = 1) -> "Tensor":
        return self.put(self + a / b * value)

    def masked_fill(self, mask: "Tensor", value: Any) -> "Tensor":
        value = value.item() if isinstance(value, Tensor) else value
        return self.with_(mask, lambda v, m: value if m else v, self.dtype)

    def masked_fill_(self, mask: "Tensor", value: Any) -> "Tensor":
        return self.put(self.masked_fill(mask, value))

    def clamp(self, min: Any = None, max: Any = None) -> "Tensor":
        low, high = (
            -math.inf if min is None else min,
            math.inf if max is None else max,
        )
        return self.each(lambda v: low if v < low else high if v > high else v)

    def nan_to_num(self, nan: Any = 0.0) -> "Tensor":
        big = 1.7976931348623157e308
        return self.each(lambda v: nan if v != v else max(-big, min(big, v)))

    def isnan(self) -> "Tensor":
        return self.each(lambda v: v != v, bool_)

    def isinf(self) -> "Tensor":
        return self.each(math.isinf, bool_)

    def isfinite(self) -> "Tensor":
        return self.each(math.isfinite, bool_)

    # -- over dims ---------------------------------------------------------------------

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
    ) -> "Tensor":  # fmt: skip
        rows, shape, wide = self.lines(dim)
        kind = kind or self.dtype
        values = rounded([fn(row) for row in rows], kind)
        return of_values(values, wide if keepdim else shape, kind)

    def sum(self, dim: Any = None, keepdim: Any = False, dtype: Any = None) -> "Tensor":
        kind = dtype or (int64 if self.dtype.kind < dtypes.FLOAT else self.dtype)
        return self.reduced(sum, dim, keepdim, kind)

    def mean(
        self, dim: Any = None, keepdim: Any = False, dtype: Any = None
    ) -> "Tensor":
        total = self.to(dtype or self.dtype).sum(dim, keepdim)
        if not total.is_floating_point():
            raise RuntimeError("mean(): the input must be floating point")
        return total / (self.numel() / max(1, total.numel()))

    def prod(self, dim: Any = None, keepdim: Any = False) -> "Tensor":
        return self.reduced(math.prod, dim, keepdim)

    def amax(self, dim: Any = None, keepdim: Any = False) -> "Tensor":
        return self.reduced(largest, dim, keepdim)

    def amin(self, dim: Any = None, keepdim: Any = False) -> "Tensor":
        return self.reduced(min, dim, keepdim)

    def all(self, dim: Any = None, keepdim: Any = False) -> "Tensor":
        return self.reduced(all, dim, keepdim, bool_)

    def any(self, dim: Any = None, keepdim: Any = False) -> "Tensor":
        return self.reduced(any, dim, keepdim, bool_)

    def argmax(self, dim: Any = None, keepdim: Any = False) -> "Tensor":
        return self.reduced(lambda row: row.index(max(row)), dim, keepdim, int64)

    def argmin(self, dim: Any = None, keepdim: Any = False) -> "Tensor":
        return self.reduced(lambda row: row.index(min(row)), dim, keepdim, int64)

    def max(self, dim: Any = None, keepdim: Any = False) -> Any:
        if isinstance(dim, Tensor):
            return self.with_(dim, max)
        if dim is None:
            return self.amax()
        return Pair((self.amax(dim, keepdim), self.argmax(dim, keepdim)))

    def min(self, dim: Any = None, keepdim: Any = False) -> Any:
        if isinstance(dim, Tensor):
            return self.with_(dim, min)
        if dim is None:
            return self.amin()
        return Pair((self.amin(dim, keepdim), self.argmin(dim, keepdim)))

    def norm(self, p: Any = 2, dim: Any = None, keepdim: Any = False) -> "Tensor":
        return self.square().sum(dim, keepdim).sqrt()

    def var(self, dim: Any = None, correction: Any = 1) -> "Tensor":
        mean = self.mean(dim, True)
        count = self.numel() // max(1, mean.numel())
        return (self - mean).square().sum(dim) / (count - correction)

    def std(self, dim: Any = None, correction: Any = 1) -> "Tensor":
        return self.var(dim, correction).sqrt()

    def logsumexp(self, dim: Any, keepdim: Any = False) -> "Tensor":
        return self.reduced(log_of_sum, dim, keepdim)

    def along(
        self, fn: Callable[[list[Any]], list[Any]], dim: Any, kind: dtype | None = None
    ) -> "Tensor":
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
        made = of_values(rounded(found, kind), shape, kind).transpose(dim, -1)
        return made.contiguous()

    def softmax(self, dim: Any, dtype: Any = None) -> "Tensor":
        return self.to(dtype or self.dtype).along(soft, dim)

    def log_softmax(self, dim: Any) -> "Tensor":
        return self - self.logsumexp(dim, True)

    def cumsum(self, dim: Any = 0) -> "Tensor":
        kind = int64 if self.dtype.kind < dtypes.FLOAT else self.dtype
        return self.along(lambda row: list(accumulate(row)), dim, kind)

    def flip(self, *dims: Any) -> "Tensor":
        found = self
        for dim in flat_shape(dims):
            found = found.along(lambda row: row[::-1], dim)
        return found

    def argsort(
        self, dim: Any = -1, descending: Any = False, stable: Any = False
    ) -> "Tensor":
        return self.along(lambda row: in_order(row, descending), dim, int64)

    def sort(self, dim: Any = -1, descending: Any = False, stable: Any = False) -> Any:
        order = self.argsort(dim, descending)
        return Pair((self.gather(dim, order), order))

    def topk(
        self, k: Any, dim: Any = -1, largest: Any = True, sorted: Any = True
    ) -> Any:
        order = self.along(lambda row: in_order(row, largest)[:k], dim, int64)
        return Pair((self.gather(dim, order), order))

    def gather(self, dim: int, index: "Tensor") -> "Tensor":
        places = self.chosen_places(dim, index)
        return of_values(
            [self.storage.data[place] for place in places], index.shape, self.dtype
        )

    def chosen_places(self, dim: int, index: "Tensor") -> list[int]:
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

    def scatter_(self, dim: int, index: "Tensor", src: Any) -> "Tensor":
        values = source_of(src, index)
        for place, value in zip(self.chosen_places(dim, index), values, strict=True):
            self.storage.data[place] = rounded([value], self.dtype)[0]
        return self

    def scatter_add_(self, dim: int, index: "Tensor", src: "Tensor") -> "Tensor":
        values = source_of(src, index)
        for place, value in zip(self.chosen_places(dim, index), values, strict=True):
            total = self.storage.data[place] + value
            self.storage.data[place] = rounded([total], self.dtype)[0]
        return self

    def scatter(self, dim: int, index: "Tensor", src: Any) -> "Tensor":
        return self.clone().scatter_(dim, index, src)

    def scatter_add(self, dim: int, index: "Tensor", src: "Tensor") -> "Tensor":
        return self.clone().scatter_add_(dim, index, src)

    def index_add_(
        self, dim: int, index: "Tensor", source: "Tensor", alpha: Any = 1
    ) -> "Tensor":
        for i, chosen in enumerate(index.values()):
            self.select(dim, chosen).add_(source.select(dim, i), alpha=alpha)
        return self

    def index_add(
        self, dim: int, index: "Tensor", source: "Tensor", alpha: Any = 1
    ) -> "Tensor":
        return self.clone().index_add_(dim, index, source, alpha)

    def index_copy_(self, dim: int, index: "Tensor", source: "Tensor") -> "Tensor":
        for i, chosen in enumerate(index.values()):
            self.select(dim, chosen).copy_(source.select(dim, i))
        return self

    def index_fill_(self, dim: int, index: "Tensor", value: Any) -> "Tensor":
        for chosen in index.values():
            self.select(dim, chosen).fill_(value)
        return self

    def nonzero(self) -> "Tensor":
        pairs = zip(product(*map(range, self.shape)), self.values(), strict=True)
        found = [list(place) for place, value in pairs if value]
        values = [n for place in found for n in place]
        return of_values(values, (len(found), self.dim()), int64)

    def bincount(self, minlength: int = 0) -> "Tensor":
        counts = [0] * max(minlength, max(self.values(), default=-1) + 1)
        for value in self.values():
            counts[value] += 1
        return of_values(counts, (len(counts),), int64)

    def unique(self) -> "Tensor":
        return tensor(sorted(set(self.values())), self.dtype)

    def triu(self, diagonal: int = 0) -> "Tensor":
        return self.kept_where(lambda row, col: col - row >= diagonal)

    def tril(self, diagonal: int = 0) -> "Tensor":
        return self.kept_where(lambda row, col: col - row <= diagonal)

    def kept_where(self, test: Callable[[int, int], Any]) -> "Tensor":
        rows, cols = self.shape[-2:]
        mask = [test(r, c) for r in range(rows) for c in range(cols)]
        kept = of_values(mask, (rows, cols), bool_)
        return self.with_(kept, lambda v, m: v if m else 0, self.dtype)

    # -- products ----------------------------------------------------------------------

    def matmul(self, other: "Tensor") -> "Tensor":
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
        return of_values(rounded(found, kind), (*batch, rows, cols), kind)

    mm = bmm = matmul

    def dot(self, other: "Tensor") -> "Tensor":
        return (self * other).sum()

    def __matmul__(self, other: "Tensor") -> "Tensor":
        return self.matmul(other)


class Pair(tuple[Tensor, ...]):
    """Values and where they were."""

    @property
    def values(self) -> Tensor:
        return self[0]

    @property
    def indices(self) -> Tensor:
        return self[1]


def short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(short, value))}]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def map_list(fn: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    return [fn(value) for value in values]


def source_of(src: Any, index: Tensor) -> list[Any]:
    """What goes to the places of an index: a tensor's numbers, or one for all."""
    if not isinstance(src, Tensor):
        return [src] * index.numel()
    return src[tuple(slice(n) for n in index.shape)].values()


def largest(row: list[Any]) -> Any:
    """NaN if one is NaN."""
    return math.nan if any(v != v for v in row) else max(row)


def log_of_sum(row: list[float]) -> float:
    top = max(row, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(sum(math.exp(v - top) for v in row))


def soft(row: list[float]) -> list[float]:
    top = max(row)
    parts = [math.exp(v - top) if top != -math.inf else math.nan for v in row]
    total = sum(parts)
    return [part / total for part in parts]


def in_order(row: list[Any], descending: Any) -> list[int]:
    return sorted(range(len(row)), key=lambda i: -row[i] if descending else row[i])


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that all expand to; RuntimeError as torch's."""
    found: list[int] = []
    for shape in shapes:
        long, other = list(found), list(shape)
        width = max(len(long), len(other))
        long = [1] * (width - len(long)) + long
        other = [1] * (width - len(other)) + other
        for i, (a, b) in enumerate(zip(long, other, strict=True)):
            if a != b and 1 not in (a, b):
                raise RuntimeError(
                    f"The size of tensor a ({a}) must match the size of tensor b "
                    f"({b}) at non-singleton dimension {i}"
                )
        found = [b if a == 1 else a for a, b in zip(long, other, strict=True)]
    return tuple(found)


def with_number(kind: dtype, number: Any) -> dtype:
    """The dtype of a tensor of `kind` with a Python number."""
    if isinstance(number, complex):
        return dtypes.complex128
    if isinstance(number, float) and kind.kind < dtypes.FLOAT:
        return dtypes.default
    return int64 if kind is bool_ and not isinstance(number, bool) else kind


def tensor_kind(a: Tensor, b: Tensor) -> dtype:
    """As torch's: one number without dims does not widen within its kind."""
    if a.shape and not b.shape and a.dtype.kind >= b.dtype.kind:
        return a.dtype
    if b.shape and not a.shape and b.dtype.kind >= a.dtype.kind:
        return b.dtype
    return promoted(a.dtype, b.dtype)


# -- operators, and functions that are methods, too --


def divided(a: Any, b: Any) -> Any:
    if b == 0:
        sign = math.copysign(1.0, a) * math.copysign(1.0, b)
        return math.nan if a != a or a == 0 else math.copysign(math.inf, sign)
    return a / b


def power(a: Any, b: Any) -> Any:
    try:
        found = a**b
    except ZeroDivisionError:
        return math.inf
    except OverflowError:
        return math.inf
    return math.nan if isinstance(found, complex) and not isinstance(a, complex) else (
        found
    )  # fmt: skip


def exp(value: Any) -> Any:
    if isinstance(value, complex):
        return cmath.exp(value)
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def log(value: float) -> float:
    if value > 0:
        return math.log(value)
    return -math.inf if value == 0 else math.nan


def sqrt(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def sigmoid(value: float) -> float:
    return 1 / (1 + exp(-value)) if value >= 0 else exp(value) / (1 + exp(value))


def log_add(a: float, b: float) -> float:
    return log_of_sum([a, b])


def either_nan(choose: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: math.nan if a != a or b != b else choose(a, b)


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": power,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
NAMED: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul, "pow": power, "remainder": operator.mod,
    "maximum": either_nan(max), "minimum": either_nan(min), "logaddexp": log_add,
}  # fmt: skip
ONE: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg, "abs": abs, "square": lambda v: v * v,
    "sign": lambda v: (v > 0) - (v < 0), "round": round, "floor": math.floor,
    "ceil": math.ceil, "trunc": math.trunc, "relu": lambda v: max(v, 0),
}  # fmt: skip
FLOATS: dict[str, Callable[[Any], Any]] = {
    "exp": exp, "log": log, "sqrt": sqrt, "tanh": math.tanh, "sin": math.sin,
    "cos": math.cos, "sigmoid": sigmoid, "log1p": math.log1p, "expm1": math.expm1,
    "reciprocal": lambda v: divided(1.0, v), "rsqrt": lambda v: divided(1.0, sqrt(v)),
}  # fmt: skip


def grown(name: str, method: Callable[..., Any]) -> None:
    """Give tensors a method, and its form that works in place."""
    setattr(Tensor, name, method)
    if not hasattr(Tensor, f"{name}_"):
        in_place: Any = lambda self, *a, **k: self.put(method(self, *a, **k))  # noqa: E731
        setattr(Tensor, f"{name}_", in_place)


def operators() -> None:
    """Fill the class with what the tables above name."""
    for name, fn in ARITHMETIC.items():

        def forward(self: Tensor, other: Any, fn: Any = fn) -> Any:
            return self.with_(other, fn)

        def backward(self: Tensor, other: Any, fn: Any = fn) -> Any:
            return self.with_(other, fn, swapped=True)

        def in_place(self: Tensor, other: Any, fn: Any = fn) -> Any:
            return self.put(self.with_(other, fn))

        setattr(Tensor, f"__{name}__", forward)
        setattr(Tensor, f"__r{name}__", backward)
        setattr(Tensor, f"__i{name}__", in_place)
    for name in COMPARED:
        fn = getattr(operator, name)

        def compared(self: Tensor, other: Any, fn: Any = fn) -> Any:
            return self.with_(other, fn, bool_)

        setattr(Tensor, f"__{name}__", compared)
        setattr(Tensor, name, compared)
    for name, fn in NAMED.items():
        grown(name, lambda self, other, fn=fn: self.with_(other, fn))
    for name, one in ONE.items():
        grown(name, lambda self, fn=one: self.each(fn))
    for name, one in FLOATS.items():
        grown(name, lambda self, fn=one: self.floats(fn))
    for name in ("add", "sub", "div", "clamp", "lerp", "triu", "tril"):
        grown(name, vars(Tensor)[name])


def true_divide(self: Tensor, other: Any, swapped: Any = False) -> Tensor:
    kinds = [self.dtype, *([other.dtype] if isinstance(other, Tensor) else [])]
    floats = any(kind.kind >= dtypes.FLOAT for kind in kinds)
    return self.with_(other, divided, None if floats else dtypes.default, swapped)


operators()
Tensor.__truediv__ = true_divide  # type: ignore[attr-defined]
Tensor.__rtruediv__ = lambda self, other: true_divide(self, other, True)  # type: ignore[attr-defined]
Tensor.__itruediv__ = lambda self, other: self.put(self / other)  # type: ignore[attr-defined]
Tensor.__neg__ = Tensor.neg  # type: ignore[attr-defined]
Tensor.__abs__ = Tensor.abs  # type: ignore[attr-defined]
Tensor.__invert__ = lambda self: self.each(  # type: ignore[attr-defined]
    operator.not_ if self.dtype is bool_ else operator.invert
)
Tensor.logical_not = Tensor.__invert__  # type: ignore[attr-defined]


# -- making tensors --


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
    products = [math.prod(each) for each in zip(*every, strict=True)]
    shape = [sizes[n] for n in right]
    width = math.prod(sizes[n] for n in summed)
    values = [
        sum(products[at : at + width]) for at in range(0, len(products), max(1, width))
    ]
    return of_values(rounded(values, kind), shape, kind)
