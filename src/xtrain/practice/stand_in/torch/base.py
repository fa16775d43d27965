"""What a tensor is: a list of numbers, and a view of it with shape and strides."""

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch import dtypes
from torch.dtypes import bool_, dtype, float64, int64

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


def flat_shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """`view(2, 3)` and `view((2, 3))` alike."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    return tuple(map(int, shape))


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


class Base:
    """Numbers of one dtype in a shape: what it is, and its numbers."""

    __slots__ = ("dtype", "grad", "node", "offset", "requires_grad", "retains", "shape",
                 "storage", "strides")  # fmt: skip

    def __init__(
        self, storage: Storage, offset: int, shape: Sequence[int],
        strides: Sequence[int], kind: dtype,
    ):  # fmt: skip
        self.storage, self.offset, self.dtype = storage, offset, kind
        self.shape, self.strides = Size(shape), tuple(strides)
        self.requires_grad = self.retains = False
        self.grad: Any = None
        self.node: Any = None

    device = device("cpu")
    is_cpu, is_cuda, is_meta = True, False, False
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

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kept = memo.setdefault(id(self.storage), Storage(list(self.storage.data)))
        return type(self)(kept, self.offset, self.shape, self.strides, self.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"tensors in a page have no `{name}`: see check on the "
                             f"command line")  # fmt: skip

    def made(self, values: list[Any], shape: Sequence[int], kind: dtype) -> Any:
        """A new tensor of numbers that its dtype has."""
        if len(values) > MOST:
            raise MemoryError(
                f"a tensor of {len(values):,} numbers; {MOST:,} are allowed"
            )
        return type(self)(Storage(values), 0, shape, strides_of(shape), kind)

    def like(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Any:
        return type(self)(self.storage, offset, shape, strides, self.dtype)

    def dim_of(self, dim: int, extra: int = 0) -> int:
        """A dim from 0 on; IndexError as torch's."""
        count = self.dim() + extra
        if not -max(1, count) <= dim < max(1, count):
            raise IndexError(
                f"Dimension out of range (expected to be in range of "
                f"[{-count}, {count - 1}], but got {dim})"
            )
        return dim % max(1, count)

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


def short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(short, value))}]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
