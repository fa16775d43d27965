"""The library form as a package of its own: it runs where xtrain cannot be imported."""

import ast
import importlib
import os
import subprocess
import sys

import pytest

from tests.whiteboard.fresh_interpreter import FreshInterpreter
from xtrain.copying.forms import forms, same_name
from xtrain.copying.library import (
    CALLED_OTHERWISE,
    SOURCE,
    CopyError,
    definition,
    library,
    needed,
    renamed,
    write_library,
)

NAMES = library()
CHECKED = [
    name for name in NAMES
    if (form := same_name(name, forms())) and form not in CALLED_OTHERWISE
]  # fmt: skip
LARGE = ["FullyShardedDataParallel", "PipelineRunner", "XtrainModel", "search"]
"""Between them they need most of the library."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder for packages, and an interpreter that has torch and no xtrain."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "xtrain.py").write_text("raise ImportError('no xtrain here')\n")
    fresh = FreshInterpreter(os.environ | {"PYTHONPATH": str(folder)})
    yield folder, fresh
    fresh.close()


@pytest.mark.parametrize("name", CHECKED)
def test_the_check_of_a_package_runs_and_is_right(name, alone):
    folder, fresh = alone
    write_library(NAMES[name], folder / f"my_{name}")
    done = fresh.run(folder / f"my_{name}" / "check.py", folder)
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout


@pytest.mark.parametrize("name", LARGE)
def test_every_module_of_a_package_can_be_imported(name, alone):
    folder, _ = alone
    package = folder / f"all_{name}"
    modules, lines = write_library(NAMES[name], package)
    written = list(package.rglob("*.py"))
    assert len(written) == modules > 20
    assert sum(len(file.read_text().splitlines()) for file in written) == lines
    names = [
        ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in written
        if file.name != "__init__.py"
    ]
    code = f"import importlib\nfor n in {names}: importlib.import_module(n)\n"
    code += f"print(importlib.import_module('{package.name}.check').__name__)"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "class" in done.stdout or "function" in done.stdout  # the name itself
    assert (package / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_modules_are_unchanged_but_for_the_packages_name(tmp_path):
    write_library(NAMES["DistributedDataParallel"], tmp_path / "mine")
    for file in tmp_path.rglob("*.py"):
        original = SOURCE / "xtrain" / file.relative_to(tmp_path / "mine")
        text = file.read_text()
        if original.is_file() and original.name != "__init__.py":
            assert text.replace("from mine.", "from xtrain.") == original.read_text()
        imports = [
            n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)
        ]
        assert not [n for n in imports if str(n.module).startswith("xtrain")]


@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_public_name_needs_is_found(name):
    """Each name that a module imports from ours is defined in what is copied."""
    module, _, last = NAMES[name].partition(":")
    assert definition(module, last, SOURCE)[1] is not None
    modules, exported = needed(module, SOURCE)
    assert module in modules
    for package, names in exported.items():
        for inner, home in names.items():
            assert home in modules, f"{package}.{inner}"
            assert hasattr(importlib.import_module(home), inner)


def test_only_the_name_in_imports_changes():
    text = "from xtrain.comm import a\nimport xtrain\nx = 'xtrain-shm'\n"
    text += "    from xtrain.zero import b  # of xtrain\nfrom xtrain_docs import c\n"
    assert renamed(text, "my") == (
        "from my.comm import a\nimport my\nx = 'xtrain-shm'\n"
        "    from my.zero import b  # of xtrain\nfrom xtrain_docs import c\n"
    )


@pytest.mark.parametrize(
    ("reference", "folder", "why"),
    [
        ("xtrain.comm.ring:ring_all_reduce", "no-name", "'no-name' cannot be the name"),
        ("xtrain.comm.ring:ring_all_reduce", "xtrain", "'xtrain' cannot be the name"),
        ("xtrain.comm.rung:ring_all_reduce", "mine", "no module 'xtrain.comm.rung'"),
        ("xtrain.comm.ring:nothing", "mine", "has no 'nothing'"),
        ("xtrain.comm.ring:ring_all_reduce", "full", "is not an empty folder"),
    ],
)
def test_what_cannot_be_written_is_refused(reference, folder, why, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CopyError, match=why):
        write_library(reference, tmp_path / folder)
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "notes.txt"]
