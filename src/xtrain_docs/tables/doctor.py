"""What `xtrain doctor` finds on the machine that builds the site."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from typing import Any

from .. import config
from . import REGISTRY, Table

# A port that was free, folders of this machine.
HERE_ONLY = ("loopback", "record", "xtrain")


@lru_cache(maxsize=1)
def findings() -> list[dict[str, Any]]:
    """A fresh run in a process of its own, as its trial ranks are forked from it."""
    paths = [str(config.SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "xtrain", "doctor", "--json"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError as problem:
        raise RuntimeError(f"xtrain doctor: {done.stdout}{done.stderr}") from problem


@REGISTRY
def doctor() -> Table:
    """The findings of `xtrain doctor`, without the places of this machine."""
    rows = [
        [f"`{found['name']}`", found["state"], shown(found["text"])]
        for found in findings()
        if found["name"] not in HERE_ONLY
    ]
    return Table(["check", "", "what it found"], rows)


def shown(text: str) -> str:
    """The text without the interpreter's path."""
    return text.replace(f" ({sys.executable})", "")
