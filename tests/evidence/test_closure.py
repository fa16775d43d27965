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
def test_a_digest_changes_with_the_closure_and_with_nothing_else(tree, changed):
    folders = (tree / "src", tree)
    root = tree / "tests/test_a.py"
    before = closure.digest([root], folders)
    (tree / changed).write_text(FILES[changed] + "# a word\n")
    within = changed in reached(tree, "tests/test_a.py")
    assert (closure.digest([root], folders) != before) == within


def test_a_digest_is_the_same_in_another_checkout(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in FILES:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text((tree / name).read_text())
    digests = {
        closure.digest([where / "tests/test_a.py"], (where / "src", where))
        for where in (tree, other)
    }
    assert len(digests) == 1


def test_what_pytest_reads_for_a_test_counts(tree):
    """Beside the test, and above it up to the root."""
    (tree / "tests/deep").mkdir()
    (tree / "tests/deep/test_b.py").write_text("")
    settings = ("tests/deep/conftest.py", "tests/conftest.py", "conftest.py")
    for name in settings:
        (tree / name).write_text("import pkg.lone\n")
    (tree / "tests/other").mkdir()
    (tree / "tests/other/conftest.py").write_text("")
    found = reached(tree, "tests/deep/test_b.py")
    packages = {"src/pkg/__init__.py", "tests/__init__.py"}
    assert found == {"tests/deep/test_b.py", *settings, *packages, "src/pkg/lone.py"}


def test_a_file_counts_under_its_name(tree):
    before = closure.digest([tree / "src/pkg/lone.py"], (tree / "src", tree))
    (tree / "src/pkg/lone.py").rename(tree / "src/pkg/only.py")
    after = closure.digest([tree / "src/pkg/only.py"], (tree / "src", tree))
    assert before != after


def test_a_file_that_is_no_program_counts_as_it_is(tree):
    (tree / "said.out").write_text("import pkg.low\n")
    assert reached(tree, "said.out") == {"said.out"}
    before = closure.digest([tree / "said.out"], (tree,))
    (tree / "said.out").write_text("import pkg.near\n")
    assert closure.digest([tree / "said.out"], (tree,)) != before


def test_within_a_steady_pass_each_file_is_looked_at_once(tree):
    folders = (tree / "src", tree)
    root = tree / "tests/test_a.py"
    before = closure.digest([root], folders)
    with closure.steady():
        assert closure.digest([root], folders) == before
        root.write_text(root.read_text() + "# edited\n")
        assert closure.digest([root], folders) == before
    assert closure.digest([root], folders) != before
