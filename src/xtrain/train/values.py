"""Values of options as text, by the type of their field.

    int         3  1_000  1e6           str            as it is, or "a JSON string"
    float       0.5  3e-4  2            Literal        one of its choices
    bool        true false 1 0 yes no   T | None       as T, or none
    tuple       0.9,0.95                tuple of str   ["a", "b"]

`read_value` reads what `show_value` writes.
"""

import dataclasses
import json
import math
import sys
from decimal import Decimal, InvalidOperation
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from xtrain.plan.checks import shown

BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
LARGEST_EXPONENT = 30  # of an int such as 1e6


def split_none(hint: Any) -> tuple[Any, bool]:
    """The type without None, and whether None was part of it."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if len(kinds) != 1:
        raise TypeError(f"{hint} is not the type of an option: use one type, or None")
    return kinds[0], True


def type_name(hint: Any) -> str:
    """The type in words: "int", "float,float", "one of a, b", "int or none"."""
    kind, optional = split_none(hint)
    if optional:
        return f"{type_name(kind)} or none"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if parts[-1] is Ellipsis:
            return f"{type_name(parts[0])},..."
        return ",".join(map(type_name, parts))
    names = {bool: "true or false", int: "int", float: "float", str: "text"}
    if kind not in names:
        raise TypeError(f"{kind} is not the type of an option")
    return names[kind]


def read_value(text: str, hint: Any) -> Any:
    """The value that the text stands for; ValueError unless it is of that type."""
    kind, optional = split_none(hint)
    if optional and text.lower() == "none":
        return None
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if text not in choices:
            raise ValueError(f"{text!r} is not among the choices")
        return choices[text]
    if get_origin(kind) is tuple:
        return _read_tuple(text, get_args(kind))
    readers = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_text}
    return readers[kind](text)


def _read_bool(text: str) -> bool:
    if text.lower() not in BOOLS:
        raise ValueError(f"{text!r} is neither true nor false")
    return BOOLS[text.lower()]


def _read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        if "e" not in text.lower():
            raise
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is not a number") from error
    if not number.is_finite() or number.adjusted() > LARGEST_EXPONENT:
        raise ValueError(f"{text!r} is not finite, or too large")
    if number != int(number):
        raise ValueError(f"{text!r} is not whole")
    return int(number)


def _read_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not finite")
    return number


def _read_text(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:  # quotes that belong to the text
            pass
    return text


def _read_tuple(text: str, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if text.startswith("["):
        parts = json.loads(text)
        texts = [part if isinstance(part, str) else json.dumps(part) for part in parts]
    else:
        texts = text.strip("()").split(",")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(texts)
    if len(texts) != len(kinds):
        raise ValueError(f"{len(texts)} values, not {len(kinds)}")
    pairs = zip(texts, kinds, strict=True)
    return tuple(
        part if kind is str else read_value(part.strip(), kind) for part, kind in pairs
    )


def show_value(value: Any, hint: Any) -> str:
    """The text that `read_value` reads as this value, on one line."""
    if value is None:
        return "none"
    kind, _ = split_none(hint)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        if not value or any(isinstance(part, str) for part in value):
            return json.dumps(value)
        return ",".join(show_value(part, type(part)) for part in value)
    if kind is str:
        plain = value.isprintable() and value.strip() == value != ""
        return (
            value if plain and read_value(value, hint) == value else json.dumps(value)
        )
    return str(value)


def fits(value: Any, hint: Any) -> bool:
    """Whether the value is of that type; an int fits float, a bool only bool."""
    kind, optional = split_none(hint)
    if value is None:
        return optional
    if get_origin(kind) is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, tuple):
            return False
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_types(part: Any) -> None:
    """ValueError unless each field of the dataclass is of its annotated type."""
    hints = get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value, hint = getattr(part, field.name), hints[field.name]
        if not fits(value, hint):
            kind, optional = split_none(hint)
            if dataclasses.is_dataclass(kind):
                name = getattr(kind, "__name__", str(kind))
                wanted = name + (" or none" if optional else "")
            else:
                wanted = type_name(hint)
            raise ValueError(f"{field.name}={shown(value)} is not of type {wanted}")
