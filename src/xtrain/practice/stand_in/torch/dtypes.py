"""Dtypes, and how a number is rounded when a tensor of one takes it."""

import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any


class dtype:
    """A kind of number: its name, bytes, and place in the order of promotion."""

    def __init__(self, name: str, itemsize: int, kind: int):
        self.name, self.itemsize, self.kind = name, itemsize, kind

    @property
    def is_floating_point(self) -> bool:
        return self.kind == FLOAT

    def __repr__(self) -> str:
        return f"torch.{self.name}"


BOOL, INTEGER, FLOAT, COMPLEX = range(4)
bool_ = dtype("bool", 1, BOOL)
uint8, int8 = dtype("uint8", 1, INTEGER), dtype("int8", 1, INTEGER)
int32, int64 = dtype("int32", 4, INTEGER), dtype("int64", 8, INTEGER)
float16, bfloat16 = dtype("float16", 2, FLOAT), dtype("bfloat16", 2, FLOAT)
float32, float64 = dtype("float32", 4, FLOAT), dtype("float64", 8, FLOAT)
complex128 = dtype("complex128", 16, COMPLEX)
ORDER = (
    bool_, uint8, int8, int32, int64, float16, bfloat16, float32, float64, complex128
)  # fmt: skip
default = float64


def promoted(a: dtype, b: dtype) -> dtype:
    """The dtype of a sum of tensors of both."""
    if {a, b} == {float16, bfloat16}:
        return float32
    return max(a, b, key=ORDER.index)


def rounded(values: Sequence[Any], kind: dtype) -> list[Any]:
    """The numbers as a tensor of this dtype holds them."""
    if kind is float64:
        return list(map(float, values))
    if kind is float32:
        return array("f", values).tolist()
    if kind.kind == INTEGER:
        return list(map(int, values))
    if kind is bool_:
        return list(map(bool, values))
    if kind is complex128:
        return list(map(complex, values))
    short = to_half if kind is float16 else to_brain
    return [short(value) for value in values]


def to_half(value: float) -> float:
    try:
        return struct.unpack("e", struct.pack("e", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def to_brain(value: float) -> float:
    """The upper half of a float32, rounded to even."""
    bits: int = struct.unpack("I", array("f", [value]).tobytes())[0]
    if value == value and not math.isinf(value):
        bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))[0]
