"""What a reader downloads runs alone: an empty folder, torch, and no xtrain.

Every form found on disk is tried, so one without a self-check fails here.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.whiteboard.fresh_interpreter import SECONDS, FreshInterpreter
from xtrain.copying import whiteboard
from xtrain.copying.forms import forms

FORMS = forms()
NO_XTRAIN = 'raise ImportError("this machine has no xtrain")\n'


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    """Where xtrain cannot be imported, and torch has been."""
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "xtrain.py").write_text(NO_XTRAIN)
    fresh = FreshInterpreter(os.environ | {"PYTHONPATH": str(hidden)})
    yield fresh
    fresh.close()


@pytest.fixture
def alone(tmp_path: Path, with_torch):
    """Runs a text as a file of its own where xtrain cannot be imported."""
    (tmp_path / "empty").mkdir()

    def run(name: str, text: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "empty" / name
        file.write_text(text)
        # What has not imported torch itself must not find that somebody has.
        if sys.platform == "linux" and "\nimport torch\n" in text:
            return with_torch.run(file, tmp_path)
        return subprocess.run(
            [sys.executable, name],
            cwd=file.parent,
            env=with_torch.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    return run


@pytest.mark.parametrize("name", FORMS)
def test_a_download_compares_and_says_what_it_sent(name, alone):
    text = whiteboard(name)
    assert text.startswith(FORMS[name].read_text().rstrip())
    done = alone(f"{name}.py", text)
    assert done.returncode == 0, done.stderr
    if FORMS[name].parent.name == "schedules":
        assert len(re.findall(r"^right: .+: .+$", done.stdout, re.M)) >= 3
        return
    assert "right on every rank: " in done.stdout
    pattern = r"^rank (\d): \d+ messages, ([\d,]+) bytes sent; .+: ([\d,]+)$"
    sent = re.findall(pattern, done.stdout, re.M)
    assert [rank for rank, _, _ in sent[:4]] == ["0", "1", "2", "3"]
    assert all(counted == formula for _, counted, formula in sent)


@pytest.mark.parametrize("name", FORMS)
def test_no_name_is_defined_twice_in_a_download(name):
    kinds = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(whiteboard(name))
    names = Counter(node.name for node in tree.body if isinstance(node, kinds))
    names.update(
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    )
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("first", ["", "import sys\nimport torch\n"])
def test_xtrain_is_out_of_reach_here(first, alone):
    done = alone("probe.py", first + "import xtrain\n")
    assert done.returncode == 1
    assert "this machine has no xtrain" in done.stderr


WRONG = [
    ("mine += arriving", "mine -= arriving", "WRONG by"),
    ("range(size - 1):  # all-gather", "range(size - 2):  # all-gather", "WRONG by"),
    (
        "2 * (size - 1) / size)",
        "(size - 1) / size)",
        "WRONG: 2(N-1)/N of the tensor: 5,760",
    ),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG, ids=[w[1] for w in WRONG])
def test_a_wrong_form_ends_with_status_1_and_says_why(old, new, said, alone):
    text = whiteboard("ring_all_reduce")
    assert text.count(old) == 1
    done = alone("ring_all_reduce.py", text.replace(old, new))
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
