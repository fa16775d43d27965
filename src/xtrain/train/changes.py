"""New values for frozen dataclasses in one another, from the inside out.

    changed(recipe, {"layout": {"data": 2, "expert": 2}, "steps": 10})

      Layout(data=2, expert=2)         each class checks all its values at once
      Recipe(layout=..., steps=10)     and once

A value that a class derived from others, as `head_dim` from `hidden_size`, is derived
again when one of its class changes. A part that is None begins with its defaults.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from xtrain.train.options import defaults_of, hints_of, part_class

T = TypeVar("T")


def changed(part: T, values: Mapping[str, Any], name: str = "") -> T:
    """The dataclass with new values; those of a part are a mapping again.

    Args:
        name: of the part, for errors.
    """
    if not values:
        return part
    kinds, changes = hints_of(type(part)), dict(values)
    for field, value in values.items():
        if isinstance(value, Mapping):
            old, inner = getattr(part, field), f"{name}{field}."
            if old is None:
                kind: Any = part_class(kinds[field])
                changes[field] = made(kind, value, inner)
            else:
                changes[field] = changed(old, value, inner)
    for one in dataclasses.fields(part):  # type: ignore[arg-type]
        if one.name not in changes and one.default is None and _is_derived(part, one):
            changes[one.name] = None
    return _checked(name, dataclasses.replace, part, **changes)  # type: ignore


def made(kind: type[T], values: Mapping[str, Any], name: str = "") -> T:
    """An instance of the dataclass: `values`, and defaults for what they lack."""
    known, complete = hints_of(kind), dict(values)
    for field, value in values.items():
        inner = part_class(known[field])
        if inner and isinstance(value, Mapping):
            complete[field] = made(inner, value, f"{name}{field}.")
    needed = set(known) - set(complete) - set(defaults_of(kind))
    missing = ", ".join(f"{name}{field}" for field in known if field in needed)
    if missing:
        raise ValueError(f"{missing} must be given: there is no default")
    return _checked(name, kind, **complete)  # type: ignore[no-any-return]


def _checked(name: str, make: Any, *args: Any, **values: Any) -> Any:
    """Make a dataclass; an error of its checks begins with the part's name."""
    try:
        return make(*args, **values)
    except ValueError as error:
        if not name:
            raise
        raise ValueError(f"{name[:-1]}: {error}") from error


def _is_derived(part: Any, field: "dataclasses.Field[Any]") -> bool:
    """Whether the class itself gives the field this value, in place of None."""
    if getattr(part, field.name) is None:
        return False
    try:
        return bool(dataclasses.replace(part, **{field.name: None}) == part)
    except ValueError:
        return False
