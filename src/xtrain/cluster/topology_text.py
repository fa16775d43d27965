"""Topologies by name, for the command line: "dgx_h100", "flat:1e-6,50e9", "links.json".

A file holds a table: {"size": 3, "links": [[0, 1, 1e-6, 50e9], [1, 2, 1e-6, 50e9]]},
a link as source, target, latency in seconds and bytes a second; with "both": false it
has one direction.
"""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

from xtrain.cluster.topology import (
    NODE,
    Topology,
    dgx_h100,
    fat_tree,
    flat,
    nvlink,
    table,
    tpu_torus,
)

BY_NAME: dict[str, Callable[..., Topology]] = {
    "dgx_h100": dgx_h100, "nvlink": nvlink, "fat_tree": fat_tree, "flat": flat,
    "tpu_torus": tpu_torus,
}  # fmt: skip
FORM = re.compile(r"(\w+)(?:\((?P<inside>.*)\)|:(?P<after>.+))?")


def topology_of(text: str, ranks: int) -> Topology | None:
    """The topology that a text names; its size is that of `ranks` unless it is given.

    Raises:
        ValueError: there is none of that name, or its arguments do not fit.
        OSError: a file that cannot be read.
    """
    if text == "none":
        return None
    if text.endswith(".json"):
        return from_file(Path(text), ranks)
    match = FORM.fullmatch(text.strip())
    if match is None or match[1] not in BY_NAME:
        names = ", ".join([*BY_NAME, "none", "FILE.json"])
        raise ValueError(f"no topology {text[:40]!r}; there are {names}")
    make = BY_NAME[match[1]]
    places, named = arguments_of(match["inside"] or match["after"] or "")
    if not places and make in (dgx_h100, fat_tree) and "nodes" not in named:
        named["nodes"] = -(-ranks // NODE)
    elif not places and make is nvlink:
        named.setdefault("ranks", ranks)
    check_arguments(text, make, places, named)
    return make(*places, **named)


def check_arguments(
    text: str, make: Callable[..., Topology], places: list, named: dict
) -> None:
    """ValueError unless they are the arguments of `make`, and numbers if they must."""
    signature = inspect.signature(make)
    try:
        bound = signature.bind(*places, **named).arguments
    except TypeError as problem:
        form = ", ".join(signature.parameters)
        raise ValueError(
            f"topology {text!r}: {problem}; {make.__name__}({form})"
        ) from None
    for name, value in bound.items():
        if signature.parameters[name].annotation is str:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, str):
                raise ValueError(f"topology {text!r}: {name}={one!r} is not a number")


def arguments_of(text: str) -> tuple[list[float | str], dict[str, float | str]]:
    """ "16, leaf=4" as places and names."""
    places: list[float | str] = []
    named: dict[str, float | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.rpartition("=")
        if equals:
            named[name.strip()] = number_of(value.strip())
        else:
            places.append(number_of(value))
    return places, named


def number_of(text: str) -> float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def from_file(path: Path, ranks: int) -> Topology:
    try:
        data = json.loads(path.read_text())
        links = {(int(a), int(b)): (float(x), float(y)) for a, b, x, y in data["links"]}
        size, both = int(data.get("size", ranks)), bool(data.get("both", True))
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ValueError(
            f'{path}: a topology is {{"size": N, "links": [[source, target, latency, '
            f"bandwidth], ...]}}: {problem!r}"
        ) from None
    return table(size, links, both)
