"""The curve of one process: data in the repository, written by a command.

    python -m xtrain_docs.spine.reference            is it what a run gives now?
    python -m xtrain_docs.spine.reference --write    run it, and write it

A test runs it anew each time. To write it is to change what all lectures reproduce:
only a change of the model, its data or its optimizer is a reason.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .. import config

Curve = dict[str, Any]
RANKS = (2, 4)
"""World sizes at which wrappers reproduce it."""
TOLERANCE = 1e-9
"""Another processor, or another torch, may add up in another order."""


def path() -> Path:
    """Its file."""
    return config.ROOT / "docs" / "data" / "spine" / "reference.json"


def reference() -> Curve:
    """Loss and gradient norm of each step, as committed."""
    return json.loads(path().read_text(encoding="utf-8"))


def fresh() -> Curve:
    """The same from a run of one process now."""
    from . import training

    return training.run(training.one_process())


def difference(curve: Curve, right: Curve, key: str) -> float:
    """The largest difference of one step's number; infinite if steps are missing."""
    if len(curve[key]) != len(right[key]):
        return float("inf")
    pairs = zip(curve[key], right[key], strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xtrain_docs.spine.reference")
    parser.add_argument("--write", action="store_true", help="run it and write it")
    now = fresh()
    if parser.parse_args(arguments).write:
        path().parent.mkdir(parents=True, exist_ok=True)
        path().write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        return 0
    largest = max(difference(now, reference(), key) for key in ("loss", "norm"))
    print(f"largest difference to {path().name}: {largest:.1e}")
    return int(not largest <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
