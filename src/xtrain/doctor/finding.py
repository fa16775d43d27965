"""What one check saw; and whether there is a source tree around this package."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xtrain


@dataclass(frozen=True)
class Finding:
    """What one check saw.

    "ok", a "note" (something is not there, and only part of xtrain needs it) or a
    "problem" (the tests cannot run).
    """

    name: str
    state: Literal["ok", "note", "problem"]
    text: str


def checkout() -> Path | None:
    """The source tree that this package runs from; None for an installed wheel."""
    folder = Path(xtrain.__file__).resolve().parents[2]
    return folder if (folder / "setup_env.py").exists() else None
