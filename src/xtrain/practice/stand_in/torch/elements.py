"""Element by element: operators and functions, also in place and with broadcasting."""

import cmath
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import dtypes
from torch.base import Base, broadcast_shape
from torch.dtypes import bool_, dtype, int64, promoted, rounded
from torch.parts import Parts


class Elements(Parts):
    """The tables below give it the operators."""

    def each(self, fn: Callable[[Any], Any], kind: dtype | None = None) -> Any:
        kind = kind or self.dtype
        return self.made(
            rounded([fn(v) for v in self.values()], kind), self.shape, kind
        )

    def floats(self, fn: Callable[[Any], Any]) -> Any:
        """A function whose results are no integers."""
        kind = self.dtype if self.dtype.kind >= dtypes.FLOAT else dtypes.default
        return self.each(fn, kind)

    def with_(
        self, other: Any, fn: Callable[[Any, Any], Any], kind: dtype | None = None,
        swapped: Any = False,
    ) -> Any:  # fmt: skip
        """`fn` of each element and of that of another tensor, or of a number."""
        if not isinstance(other, Base):
            if not isinstance(other, int | float | complex):
                return NotImplemented
            kind = kind or with_number(self.dtype, other)
            if swapped:
                values = [fn(other, value) for value in self.values()]
            else:
                values = [fn(value, other) for value in self.values()]
            return self.made(rounded(values, kind), self.shape, kind)
        a, b = (other, self) if swapped else (self, other)
        kind = kind or tensor_kind(a, b)
        shape: Sequence[int] = a.shape
        if a.shape != b.shape:
            shape = broadcast_shape(a.shape, b.shape)
            a, b = a.expand(shape), b.expand(shape)
        values = list(map(fn, a.values(), b.values()))
        return self.made(rounded(values, kind), shape, kind)

    def put(self, found: Any) -> Any:
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

    def add(self, other: Any, alpha: Any = 1) -> Any:
        return self + (other * alpha if alpha != 1 else other)

    def sub(self, other: Any, alpha: Any = 1) -> Any:
        return self - (other * alpha if alpha != 1 else other)

    def div(self, other: Any, rounding_mode: Any = None) -> Any:
        if rounding_mode == "floor":
            return self // other
        return self / other if rounding_mode is None else (self / other).trunc()

    def lerp(self, end: Any, weight: Any) -> Any:
        return self + (end - self) * weight

    def addcmul_(self, a: Any, b: Any, value: Any = 1) -> Any:
        return self.put(self + a * b * value)

    def addcdiv_(self, a: Any, b: Any, value: Any = 1) -> Any:
        return self.put(self + a / b * value)

    def masked_fill(self, mask: Any, value: Any) -> Any:
        value = value.item() if isinstance(value, Base) else value
        return self.with_(mask, lambda v, m: value if m else v, self.dtype)

    def masked_fill_(self, mask: Any, value: Any) -> Any:
        return self.put(self.masked_fill(mask, value))

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        low, high = (
            -math.inf if min is None else min,
            math.inf if max is None else max,
        )
        return self.each(lambda v: low if v < low else high if v > high else v)

    def nan_to_num(self, nan: Any = 0.0) -> Any:
        big = 1.7976931348623157e308
        return self.each(lambda v: nan if v != v else max(-big, min(big, v)))

    def isnan(self) -> Any:
        return self.each(lambda v: v != v, bool_)

    def isinf(self) -> Any:
        return self.each(math.isinf, bool_)

    def isfinite(self) -> Any:
        return self.each(math.isfinite, bool_)


def with_number(kind: dtype, number: Any) -> dtype:
    """The dtype of a tensor of `kind` with a Python number."""
    if isinstance(number, complex):
        return dtypes.complex128
    if isinstance(number, float) and kind.kind < dtypes.FLOAT:
        return dtypes.default
    return int64 if kind is bool_ and not isinstance(number, bool) else kind


def tensor_kind(a: Any, b: Any) -> dtype:
    """As torch's: one number without dims does not widen within its kind."""
    if a.shape and not b.shape and a.dtype.kind >= b.dtype.kind:
        return a.dtype
    if b.shape and not a.shape and b.dtype.kind >= a.dtype.kind:
        return b.dtype
    return promoted(a.dtype, b.dtype)


def log_of_sum(row: list[float]) -> float:
    top = max(row, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(sum(math.exp(v - top) for v in row))


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
    setattr(Elements, name, method)
    if not hasattr(Elements, f"{name}_"):
        in_place: Any = lambda self, *a, **k: self.put(method(self, *a, **k))  # noqa: E731
        setattr(Elements, f"{name}_", in_place)


def operators() -> None:
    """Fill the class with what the tables above name."""
    for name, fn in ARITHMETIC.items():

        def forward(self: Elements, other: Any, fn: Any = fn) -> Any:
            return self.with_(other, fn)

        def backward(self: Elements, other: Any, fn: Any = fn) -> Any:
            return self.with_(other, fn, swapped=True)

        def in_place(self: Elements, other: Any, fn: Any = fn) -> Any:
            return self.put(self.with_(other, fn))

        setattr(Elements, f"__{name}__", forward)
        setattr(Elements, f"__r{name}__", backward)
        setattr(Elements, f"__i{name}__", in_place)
    for name in COMPARED:
        fn = getattr(operator, name)

        def compared(self: Elements, other: Any, fn: Any = fn) -> Any:
            return self.with_(other, fn, bool_)

        setattr(Elements, f"__{name}__", compared)
        setattr(Elements, name, compared)
    for name, fn in NAMED.items():
        grown(name, lambda self, other, fn=fn: self.with_(other, fn))
    for name, one in ONE.items():
        grown(name, lambda self, fn=one: self.each(fn))
    for name, one in FLOATS.items():
        grown(name, lambda self, fn=one: self.floats(fn))
    for name in ("add", "sub", "div", "clamp", "lerp"):
        grown(name, vars(Elements)[name])


def true_divide(self: Elements, other: Any, swapped: Any = False) -> Elements:
    kinds = [self.dtype, *([other.dtype] if isinstance(other, Elements) else [])]
    floats = any(kind.kind >= dtypes.FLOAT for kind in kinds)
    return self.with_(other, divided, None if floats else dtypes.default, swapped)


operators()
Elements.__truediv__ = true_divide  # type: ignore[attr-defined]
Elements.__rtruediv__ = lambda self, other: true_divide(self, other, True)  # type: ignore[attr-defined]
Elements.__itruediv__ = lambda self, other: self.put(self / other)  # type: ignore[attr-defined]
Elements.__neg__ = Elements.neg  # type: ignore[attr-defined]
Elements.__abs__ = Elements.abs  # type: ignore[attr-defined]
Elements.__invert__ = lambda self: self.each(  # type: ignore[attr-defined]
    operator.not_ if self.dtype is bool_ else operator.invert
)
Elements.logical_not = Elements.__invert__  # type: ignore[attr-defined]
