"""Options of the command line over a recipe, and the help that lists them.

    recipe = overridden(recipe, ["--layout.data=2", "--data.path", "x", "--compile"])

Every field of the recipe and of its parts is an option, under its dotted name. It works
on any frozen dataclasses in one another.
"""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from xtrain.plan.checks import shown
from xtrain.train.changes import changed
from xtrain.train.options import Option, all_help, options_of
from xtrain.train.values import read_value, show_value, split_none, type_name

T = TypeVar("T")
WIDTH, INDENT = 88, " " * 6


def overridden(recipe: T, words: Sequence[str]) -> T:
    """The recipe with the options of a command line; the last one of a name counts.

    Args:
        words: `--a.b=v`, or `--a.b` and `v`; `--a.b` and `--no-a.b` of a bool. "-" may
            stand for "_".

    Raises:
        ValueError: an option is unknown, a value is not of its type, or a class of the
            recipe refuses it.
    """
    return changed(recipe, nested(options_given(recipe, words)))


def options_given(recipe: Any, words: Sequence[str]) -> dict[str, Any]:
    """The values of a command line by dotted name; errors as `overridden`."""
    table = {option.name: option for option in options_of(recipe)}
    given: dict[str, Any] = {}
    rest = list(words)
    while rest:
        name, value = _next_option(rest, table)
        given[name] = value
    return given


def _next_option(rest: list[str], table: Mapping[str, Option]) -> tuple[str, Any]:
    """Take an option off the words, and its value."""
    word = rest.pop(0)
    if not word.startswith("--") or word == "--":
        raise ValueError(f"unexpected {shown(word)}: options are --name=value")
    written, equals, text = word[2:].partition("=")
    name = written.replace("-", "_")
    if name not in table:
        positive = name.removeprefix("no_")
        if positive != name and not equals and _is_bool(table.get(positive)):
            return positive, False
        raise ValueError(unknown_option(written, table))
    option = table[name]
    if not equals:
        if _is_bool(option):
            return name, True
        if not rest or rest[0].startswith("--"):
            wanted = "none" if option.part else type_name(option.hint)
            raise ValueError(f"--{name} has no value, of type {wanted}")
        text = rest.pop(0)
    if option.part:
        if text.lower() != "none":
            raise ValueError(
                f"--{name}={shown(text)} is not none: {_group(name, table)}"
            )
        return name, None
    try:
        return name, read_value(text, option.hint)
    except ValueError:
        wanted = type_name(option.hint)
        raise ValueError(f"--{name}={shown(text)} is not of type {wanted}") from None


def _is_bool(option: Option | None) -> bool:
    return option is not None and split_none(option.hint)[0] is bool


def unknown_option(written: str, names: Mapping[str, Option]) -> str:
    """The error for an option that is not there, with the nearest ones."""
    name = written.replace("-", "_")
    if any(other.startswith(f"{name}.") for other in names):
        return f"--{written} takes no value: {_group(name, names)}"
    negated, name = name.startswith("no_"), name.removeprefix("no_")
    last = name.rpartition(".")[2]
    same = [other for other in names if other.rpartition(".")[2] == last]
    near = get_close_matches(name, same, 3, 0.0) or get_close_matches(name, names, 1)
    flags = [
        f"--{'no-' * (negated and _is_bool(names[other]))}{other}" for other in near
    ]
    hint = f"did you mean {' or '.join(flags)}?"
    written = written if len(written) <= 40 else written[:37] + "..."
    return f"unknown option --{written}: {hint if near else '--help lists all'}"


def _group(name: str, names: Mapping[str, Any]) -> str:
    own = [f"--{other}" for other in names if other.startswith(f"{name}.")]
    return f"it is a group of options, {', '.join(own)}"


def nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as dicts in dicts: "layout.data" is "data" in that of "layout"."""
    tree: dict[str, Any] = {}
    for name, value in sorted(given.items()):  # a part comes before its fields
        *parts, last = name.split(".")
        branch = tree
        for part in parts:
            branch = branch.setdefault(part, {})
            if branch is None:
                group = name.rpartition(".")[0]
                raise ValueError(f"--{name} and --{group}=none exclude each other")
        branch[last] = value
    return tree


def help_text(recipe: Any) -> str:
    """All options by group: the value that the recipe has, its type, and the help."""
    lines: list[str] = []
    helps, group = all_help(type(recipe)), None
    for option in options_of(recipe):
        part = option.name.rpartition(".")[0]
        if part != group:
            group = part
            lines += ["", f"{part or 'run'}:"]
        lines += _help_lines(option, helps.get(option.name, ""))
    return "\n".join(lines[1:]) + "\n"


def _help_lines(option: Option, about: str) -> list[str]:
    if option.part:
        value = "none" if option.value is None else "..."
        kind = "none, or its own options"
    else:
        known = option.value is not dataclasses.MISSING
        value = show_value(option.value, option.hint) if known else ""
        kind = type_name(option.hint)
    text = f"{about} ({kind})".strip()
    return [
        f"  --{option.name}={value}",
        *textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT),
    ]
