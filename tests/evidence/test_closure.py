"""The import closure: every file that can change an outcome, and no other."""

import pytest

from xtrain.evidence import closure

FILES = {
    "src/pkg/__init__.py": "",
    "src/pkg/low.py": "X = 1\n",
    "src/pkg/near.py": "Y = 1\n",
    "src/pkg/sub/__init__.py": "from ..low import X\n",
    "src/pkg/sub/user.py": "from .. import near\n",
    "src/pkg/sub/late.py": "def f():\n    from pkg.lazy import Z\n    return Z\n",
    "src/pkg/lazy.py": "import torch\nZ = 1\n",
    "src/pkg/other.py": "from . import lone\n",
    "src/pkg/lone.py": "",
    "tests/__init__.py": "",
    "tests/test_a.py": "import pkg.sub.user\nfrom tests.helper import h\n",
    "tests/helper.py": "from pkg.sub import late as h\n",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def reached(tree, *roots):
    folders = (tree / "src", tree)
    found = closure.closure([tree / root for root in roots], folders)
    return {path.relative_to(tree).as_posix() for path in found}


def test_imports_are_followed_wherever_they_stand(tree):
    unrelated = {"src/pkg/other.py", "src/pkg/lone.py"}
    assert reached(tree, "tests/test_a.py") == FILES.keys() - unrelated


def test_relative_imports_are_resolved_against_the_package(tree):
    assert reached(tree, "src/pkg/other.py") == {
        "src/pkg/__init__.py",
        "src/pkg/lone.py",
        "src/pkg/other.py",
    }


def test_the_packages_above_a_file_run_first(tree):
    assert "src/pkg/low.py" in reached(tree, "src/pkg/sub/late.py")


def test_a_cycle_ends(tree):
    (tree / "src/pkg/lone.py").write_text("from pkg import other\n")
    assert "src/pkg/other.py" in reached(tree, "src/pkg/lone.py")


@pytest.mark.parametrize("changed", sorted(FILES))
def test_a_stamp_changes_with_the_closure_and_with_nothing_else(tree, changed):
    folders = (tree / "src", tree)
    root = tree / "tests/test_a.py"
    before = closure.stamp([root], folders)
    (tree / changed).write_text(FILES[changed] + "# a word\n")
    within = changed in reached(tree, "tests/test_a.py")
    assert (closure.stamp([root], folders) != before) == within


def test_a_stamp_is_the_same_in_another_checkout(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in FILES:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text((tree / name).read_text())
    stamps = {
        closure.stamp([where / "tests/test_a.py"], (where / "src", where), "2.13")
        for where in (tree, other)
    }
    assert len(stamps) == 1


def test_what_else_is_given_is_part_of_the_stamp(tree):
    root, folders = tree / "tests/test_a.py", (tree / "src", tree)
    stamps = {closure.stamp([root], folders, minor) for minor in ("2.13", "2.14")}
    assert len(stamps) == 2


def test_within_a_steady_pass_each_file_is_looked_at_once(tree):
    folders = (tree / "src", tree)
    root = tree / "tests/test_a.py"
    before = closure.stamp([root], folders)
    with closure.steady():
        assert closure.stamp([root], folders) == before
        root.write_text(root.read_text() + "# edited\n")
        assert closure.stamp([root], folders) == before
    assert closure.stamp([root], folders) != before
