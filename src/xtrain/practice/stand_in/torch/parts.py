"""Reading and writing parts: numbers, slices, None, ..., and tensors as indices."""

import operator
from typing import Any

from torch.base import Base, broadcast_shape
from torch.dtypes import bool_, dtype, int64, rounded
from torch.views import Views


class Parts(Views):
    """`x[1:, None, index] = y`, as torch does it."""

    def listed(self, data: Any, kind: dtype | None = None) -> Any:
        """A tensor of a number or of a list of numbers."""
        values = list(data) if isinstance(data, list | range) else [data]
        shape = [len(values)] if isinstance(data, list | range) else []
        if kind is None:
            kind = bool_ if values and isinstance(values[0], bool) else int64
        return self.made(rounded(values, kind), shape, kind)

    def __getitem__(self, index: Any) -> Any:
        view, chosen = self.basic(index)
        if not chosen:
            return view
        places, shape = view.advanced(chosen)
        data = self.storage.data
        return self.made([data[place] for place in places], shape, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        view, chosen = self.basic(index)
        if not chosen:
            view.copy_(value)
            return
        places, shape = view.advanced(chosen)
        source = value if isinstance(value, Base) else self.listed(value, self.dtype)
        values = rounded(source.expand(shape).values(), self.dtype)
        for place, number in zip(places, values, strict=True):
            self.storage.data[place] = number

    def basic(self, index: Any) -> tuple[Any, dict[int, Any]]:
        """The view of the parts that are numbers and slices; of the rest, by dim."""
        parts = list(index) if isinstance(index, tuple) else [index]
        parts = [self.listed(p) if isinstance(p, list | range) else p for p in parts]
        used = sum(
            p.dim() if isinstance(p, Base) and p.dtype is bool_ else 1
            for p in parts if p is not None and p is not ...
        )  # fmt: skip
        if used > self.dim():
            raise IndexError(f"too many indices for tensor of dimension {self.dim()}")
        if ... not in [p for p in parts if not isinstance(p, Base)]:
            parts.append(...)
        place = next(i for i, p in enumerate(parts) if p is ...)
        parts[place : place + 1] = [slice(None)] * (self.dim() - used)
        offset, shape, steps, at = self.offset, [], [], 0
        chosen: dict[int, Any] = {}
        for part in parts:
            if part is None:
                shape.append(1)
                steps.append(1)
                continue
            if isinstance(part, Base) and (part.dim() or part.dtype is bool_):
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

    def advanced(self, chosen: dict[int, Any]) -> tuple[list[int], list[int]]:
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
            return list(type(self)(self.storage, 0, shape, steps, self.dtype).places())

        tail = offsets(after)
        places = [
            self.offset + a + b + c for a in offsets(before) for b in sums for c in tail
        ]
        shape = [self.shape[d] for d in before] + [*common]
        return places, shape + [self.shape[d] for d in after]
