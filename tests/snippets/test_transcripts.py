"""Every snippet prints what its transcript says, and keeps to the house's rules.

snippets/lc1/ring_all_reduce.py     a program a reader runs
snippets/lc1/ring_all_reduce.out    what it printed, rank by rank
snippets/wrong/lc1/...              broken on purpose; the .out shows the symptom
"""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from xtrain.testing import run_script

ROOT = Path(__file__).parents[2]
SNIPPETS = sorted((ROOT / "snippets").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SNIPPETS]

# These look at TCP counters, which only Linux has.
LINUX_ONLY = ("snippets/lc1/ledger.py",)


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch):
    """Transcripts are of gloo on a CPU, and their paths are seen from the root.

    The plugin hides GPUs from this process and from the scripts that it starts.
    """
    monkeypatch.chdir(ROOT)
    # A snippet may start processes of its own.
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_run_prints_the_transcript(name):
    if name in LINUX_ONLY and sys.platform != "linux":
        pytest.skip("needs the TCP counters of Linux")
    transcript = Path(name).with_suffix(".out").read_text()
    assert "".join(run_script(name, timeout=60)) == transcript


def imports_of(path: str) -> dict[str, set[str]]:
    """The names a file imports, by top-level package."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name.split(".")[0], set()).add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.setdefault(node.module.split(".")[0], set()).update(names)
    return found


SCENE = {
    "xtrain.comm.CommLedger",
    "xtrain.comm.init_mesh",
    "xtrain.model.XtrainConfig",
    "xtrain.model.XtrainModel",
    "xtrain.testing.RankTimeout",
}
"""What a snippet may need besides: the model, its mesh, who counts, the harness's error
of a broken twin."""


@pytest.mark.parametrize("name", NAMES)
def test_a_snippet_fits_on_a_page_names_its_command_and_needs_few_names(name):
    """Two of ours at most; from lecture 4 on, which puts things together, four."""
    lines = Path(name).read_text().splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 88
    mark, program, *options = lines[0].split()
    assert (mark, options[-1]) == ("#", name)
    assert len(options) == {"torchrun": 3, "python": 1}[program]
    imports = imports_of(name)
    ours = imports.pop("xtrain", set())
    for theirs in ("torch", "safetensors"):
        imports.pop(theirs, None)
    assert imports.keys() <= sys.stdlib_module_names
    composes = re.search(r"/lc(\d)/", name)
    most = 4 if composes and int(composes[1]) >= 4 else 2
    assert len(ours - SCENE) <= most


def test_no_transcript_without_its_program():
    transcripts = {
        path.with_suffix(".py") for path in (ROOT / "snippets").rglob("*.out")
    }
    assert transcripts == set(SNIPPETS)


def names_of_the_standard_library(folder: Path) -> list[str]:
    """Files that would hide a module of the standard library from their neighbours."""
    return [p.name for p in folder.glob("*.py") if p.stem in sys.stdlib_module_names]


def test_no_snippet_hides_a_module_of_the_standard_library(tmp_path):
    for folder in {path.parent for path in SNIPPETS}:
        assert names_of_the_standard_library(folder) == []
    (tmp_path / "profile.py").touch()
    (tmp_path / "profile_collectives.py").touch()
    assert names_of_the_standard_library(tmp_path) == ["profile.py"]
