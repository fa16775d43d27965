"""Runs Python as the page's worker does: with the stand-in for torch on the path."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import xtrain

SOURCE = Path(xtrain.__file__).parent
BEFORE = f"""
import json, sys, types
for part in ("comm", "testing"):  # whose __init__ imports all of torch
    package = types.ModuleType(f"xtrain.{{part}}")
    package.__path__ = [{str(SOURCE)!r} + "/" + part]
    sys.modules[package.__name__] = package
sys.path.insert(0, {str(SOURCE.parent)!r})
from xtrain.practice import page
page.start()
import torch
assert torch.STAND_IN
"""


def in_page(program: str, given: Any = None, timeout: float = 300) -> Any:
    """What a program, which has `given`, leaves in `found`."""
    code = (
        f"{BEFORE}\ngiven = json.load(sys.stdin)\n{program}\nprint(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(given), text=True,
        capture_output=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def verdicts(files: list[tuple[str, str]], timeout: float = 300) -> list[Any]:
    """What the page answers to each (drill, source)."""
    program = "found = [json.loads(page.answer(*file)) for file in given]"
    return in_page(program, files, timeout)
