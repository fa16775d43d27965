"""The fields of nested dataclasses as options, with help from their docstrings.

    @dataclass(frozen=True, kw_only=True)
    class Layout:
        data: int = 1
        \"\"\"Ranks with batches of their own.\"\"\"

    Recipe.layout.data   --->   layout.data, int, 1, "Ranks with batches of their own."

A help line stands in a string under its field, or under `Args:` in the docstring of the
class. An outer class can have a table `HELP` for fields of its parts, by dotted name:
{"layout.tensor": "..."}; it takes precedence.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_type_hints

from xtrain.train.values import split_none

ENTRY = re.compile(r" {4}(\w+(?:, \w+)*): (.*)")


class Option(NamedTuple):
    """A field under its dotted name."""

    name: str
    hint: Any
    """Its type; None belongs to it where the field's default is None."""
    value: Any
    """What the recipe has; MISSING where there is neither a part nor a default."""
    part: bool
    """A dataclass or None; its own fields follow as options."""
    present: bool
    """It belongs to the recipe; not so a field of a part that is None."""


def options_of(recipe: Any) -> list[Option]:
    """All options of a dataclass instance; those of a part follow its own fields."""
    return list(_options(type(recipe), recipe, ""))


def _options(kind: type, part: Any, prefix: str) -> Iterator[Option]:
    there = part is not None
    defaults, parts = {} if there else defaults_of(kind), []
    for name, hint in hints_of(kind).items():
        default, inner = defaults.get(name, dataclasses.MISSING), part_class(hint)
        value = getattr(part, name) if there else default
        if inner:
            parts.append((prefix + name, hint, inner, value))
        else:
            yield Option(prefix + name, hint, value, False, there)
    for name, hint, inner, value in parts:
        if split_none(hint)[1]:
            yield Option(name, hint, value, True, there and value is None)
        held = value if dataclasses.is_dataclass(value) else None
        yield from _options(inner, held, f"{name}.")


def part_class(hint: Any) -> type | None:
    """The dataclass that the type asks for, if it does."""
    kind = split_none(hint)[0]
    return kind if dataclasses.is_dataclass(kind) else None  # type: ignore[return-value]


def hints_of(kind: type) -> dict[str, Any]:
    """Types of the fields; with None where the default is None."""
    hints = get_type_hints(kind)
    return {
        field.name: hints[field.name] | None
        if field.default is None
        else hints[field.name]
        for field in dataclasses.fields(kind)
        if field.init
    }


def defaults_of(kind: type) -> dict[str, Any]:
    """The fields that have a default, and it."""
    found = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def all_help(kind: type, prefix: str = "") -> dict[str, str]:
    """The help lines of a dataclass and its parts, by dotted name."""
    found = {prefix + name: text for name, text in help_of(kind).items()}
    for name, hint in hints_of(kind).items():
        if inner := part_class(hint):
            found |= all_help(inner, f"{prefix}{name}.")
    table: Mapping[str, str] = getattr(kind, "HELP", {})
    return found | {prefix + name: text for name, text in table.items()}


def help_of(kind: type) -> dict[str, str]:
    """The help line of each field, its own and those of the classes below it."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if "__dataclass_fields__" in vars(one):
            found |= {**_in_docstring(one), **_under_fields(one)}
    return {name: " ".join(text.split()) for name, text in found.items()}


def _under_fields(kind: type) -> dict[str, str]:
    """Strings that follow a field."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):  # a class without a file
        return {}
    body = tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, after in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[field.target.id] = text
    return found


def _in_docstring(kind: type) -> dict[str, str]:
    """Entries `name: text` or `one, two: text` under `Args:`."""
    lines = inspect.cleandoc(kind.__doc__ or "").splitlines()
    found: dict[str, str] = {}
    names: list[str] = []
    start = lines.index("Args:") + 1 if "Args:" in lines else len(lines)
    for line in lines[start:]:
        if line and not line.startswith(" "):
            break  # the next section
        if entry := ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            text = entry[2][:1].upper() + entry[2][1:]
            found |= dict.fromkeys(names, text)
        else:
            found |= {name: f"{found[name]} {line}" for name in names}
    return found
