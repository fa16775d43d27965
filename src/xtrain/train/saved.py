"""A whole configuration as text and as JSON, which give an equal one back.

    show      layout.data = 2                 for a reader; `from_text` reads it
    to_json   {"version": 1, "recipe": {"layout": {"data": 2, ...}, ...}}

A run keeps the JSON with its results. Numbers are written so that the same float
is read.
"""

import dataclasses
import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from xtrain.plan.checks import shown
from xtrain.train.changes import made
from xtrain.train.options import hints_of, options_of, part_class
from xtrain.train.overrides import overridden
from xtrain.train.values import fits, show_value, split_none, type_name

T = TypeVar("T")
VERSION = 1
"""Of the JSON: a higher one has fields with another meaning."""


def show(recipe: Any) -> str:
    """A line `a.b = value` for each value."""
    return "".join(
        f"{option.name} = {show_value(option.value, option.hint)}\n"
        for option in options_of(recipe)
        if option.present and not (option.part and option.value is not None)
    )


def from_text(text: str, recipe: T) -> T:
    """The recipe with the values of such lines, all or a few; # begins a comment."""
    words = []
    for line in map(str.strip, text.split("\n")):
        if line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            if not equals:
                raise ValueError(f"line {shown(line)} is not of the form name = value")
            words.append(f"--{name.strip()}={value.strip()}")
    return overridden(recipe, words)


def to_json(recipe: Any) -> str:
    """All values and the version, as JSON."""
    data = {"version": VERSION, "recipe": dataclasses.asdict(recipe)}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def from_json(text: str, kind: type[T]) -> T:
    """The dataclass `kind` that `to_json` wrote; missing fields have their defaults.

    Raises:
        ValueError: it is of another version or no such JSON, it has an unknown field
            or a value of another type, or lacks a field without a default.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or not {"version", "recipe"} <= data.keys():
        raise ValueError("not a saved recipe: it has no version and recipe")
    version = data["version"]
    if version != VERSION:
        raise ValueError(f"version={shown(version)}, but this xtrain reads {VERSION}")
    return made(kind, _read_part(kind, data["recipe"], ""))


def _read_part(kind: type, data: Any, name: str) -> dict[str, Any]:
    """The values of a dataclass, with tuples for lists; types are checked."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{name[:-1] or 'recipe'}={shown(data)} is not an object")
    hints = hints_of(kind)
    values: dict[str, Any] = {}
    for field, value in data.items():
        if field not in hints:
            near = get_close_matches(field, hints, 1)
            ask = f": did you mean {name}{near[0]}?" if near else ""
            raise ValueError(f"unknown field {name}{field}{ask}")
        hint, inner = hints[field], part_class(hints[field])
        if inner and not (value is None and split_none(hint)[1]):
            values[field] = _read_part(inner, value, f"{name}{field}.")
            continue
        value = tuple(value) if isinstance(value, list) else value
        if inner is None and not fits(value, hint):
            wanted = type_name(hint)
            raise ValueError(f"{name}{field}={shown(value)} is not of type {wanted}")
        values[field] = value
    return values
