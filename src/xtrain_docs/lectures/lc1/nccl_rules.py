"""The rules of the backend "nccl-rules", as its own table holds them."""

import re

from xtrain.backends.nccl_rules.rules import RULES

from ...tables import REGISTRY, Table

FILES = {
    "P": "`distributed_c10d.py`",
    "F": "`ProcessGroupNCCL.cpp`",
    "U": "`NCCLUtils.hpp`",
    "N": "NCCL's guide",
}
PLACE = re.compile(rf"([{''.join(FILES)}]) (.*?)(?:[;,] (?=[A-Z] )|$)")
CODE = re.compile(r"[\w.]*(?:_|\b\.\b|::|\(\))[\w.:()]*")
INFERRED = ("complex", "to itself", "sizes", "calls", "first use", "group's first use")
"""Rules that torch's source and NCCL's guide imply and do not state."""


@REGISTRY
def nccl_rules() -> Table:
    """Every rule: its name, its text, its source, and what to do about it."""
    rows = [
        (
            f"`{name}`{', inferred' if name in INFERRED else ''}",
            with_code(rule.text) + ".",
            "; ".join(map(written_out, PLACE.findall(rule.source))),
            with_code(rule.cure),
        )
        for name, rule in RULES.items()
    ]
    return Table(("rule", "what it says", "source", "cure"), rows)


def written_out(place: tuple[str, str]) -> str:
    """A place in a file or a guide, whose name is a letter in the table."""
    letter, names = place
    parts = names if letter == "N" else f"`{names.replace(', ', '`, `')}`"
    return f"{FILES[letter]}: {parts}"


def with_code(text: str) -> str:
    return CODE.sub(lambda found: f"`{found[0]}`", text)
