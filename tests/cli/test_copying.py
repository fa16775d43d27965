"""`xtrain copy`: which form a name gives, where it goes, and what is refused."""

import re
import subprocess
import sys

import pytest

from xtrain import cli
from xtrain.cli.copying import listing
from xtrain.copying import whiteboard
from xtrain.copying.forms import forms
from xtrain.copying.library import SOURCE, library, needed

RING = "xtrain.comm.ring:ring_all_reduce"


def copy(capsys, *words) -> tuple[int, str, str]:
    code = cli.main(["copy", *map(str, words)])
    return code, *capsys.readouterr()


def test_an_algorithm_comes_as_its_whiteboard_form_with_self_check(capsys):
    code, out, err = copy(capsys, "ring_all_reduce")
    assert (code, out) == (0, whiteboard("ring_all_reduce"))
    lines = len(out.splitlines())
    form = "whiteboard form ring_all_reduce, with self-check"
    assert err == f"{form}: {lines} lines\n"


@pytest.mark.parametrize("words", [["RingAllReduce", "--library"], [RING]])
def test_the_library_form_comes_as_a_folder(capsys, tmp_path, words):
    code, out, err = copy(capsys, *words, "-o", tmp_path / "mine")
    assert (code, out) == (0, "")
    assert re.match(rf"{RING}: \d+ modules, \d+ lines -> .*mine\n", err)
    assert "`python -m mine.check` checks it" in err
    assert "def ring_all_reduce(" in (tmp_path / "mine/comm/ring.py").read_text()


def test_what_has_no_whiteboard_form_comes_as_library_form(capsys, tmp_path):
    assert copy(capsys, "barrier", "-o", tmp_path / "mine")[0] == 0
    assert "def barrier(" in (tmp_path / "mine/comm/collectives.py").read_text()


def test_a_class_is_found_by_the_name_of_a_form_and_the_other_way_round(
    capsys, tmp_path
):
    words = "--library", "distributed_data_parallel", "-o", tmp_path / "mine"
    assert "DistributedDataParallel" in copy(capsys, *words)[2]
    assert copy(capsys, "RingAllReduce")[1] == whiteboard("ring_all_reduce")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["ring_al_reduce"], "nearest: ring_all_reduce"),
        (["ring_al_reduce", "--library"], "nearest: ring_all_reduce"),
        (["ZeroOptimiser"], "nearest: ZeroOptimizer"),
        (["qqqq"], "`xtrain copy --list` names everything"),
        (["nope"], "'nope'; `xtrain copy --list` names everything"),
        (["x" * 1000], "`xtrain copy --list` names everything"),
        (["xtrain.comm.ring:nothing", "-o", "mine"], "has no 'nothing'"),
        (["xtrain.comm.rung:ring", "-o", "mine"], "no module 'xtrain.comm.rung'"),
        (["barrier"], "is a package of several files: name it, -o DIR"),
        ([], "copy what?"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones_and_code_2(capsys, words, near):
    code, out, err = copy(capsys, *words)
    assert (code, out) == (2, "")
    assert near in err and err.startswith("xtrain copy: ") and len(err) <= 201


def test_a_file_is_written_and_replaced_only_when_told(capsys, tmp_path):
    path = tmp_path / "mine.py"
    code, out, err = copy(capsys, "ring_all_reduce", "-o", path)
    assert (code, out) == (0, "")
    assert err.endswith(f" -> {path}\n")
    assert path.read_text() == whiteboard("ring_all_reduce")
    path.write_text("my notes")
    code, _, err = copy(capsys, "ring_all_reduce", "-o", path)
    assert code == 2
    assert "exists: pass --force to replace it" in err
    assert path.read_text() == "my notes"
    assert copy(capsys, "ring_all_reduce", "-o", path, "--force")[0] == 0
    assert path.read_text() == whiteboard("ring_all_reduce")
    assert copy(capsys, "ring_all_reduce", "-o", tmp_path / "no" / "x.py")[0] == 2
    dangling, elsewhere = tmp_path / "link.py", tmp_path / "elsewhere.py"
    dangling.symlink_to(elsewhere)
    assert copy(capsys, "ring_all_reduce", "-o", dangling)[0] == 2
    assert not elsewhere.exists()


def test_nothing_is_written_through_a_link_that_leads_nowhere(capsys, tmp_path):
    link, aim = tmp_path / "link.py", tmp_path / "elsewhere.py"
    link.symlink_to(aim)
    for words, said in ([], "exists"), (["--force"], "is not a regular file"):
        code, _, err = copy(capsys, "ring_all_reduce", "-o", link, *words)
        assert code == 2 and said in err and len(err.splitlines()) == 1
    assert not aim.exists() and link.is_symlink()
    aim.write_text("mine")
    assert copy(capsys, "ring_all_reduce", "-o", link, "--force")[0] == 0
    assert aim.read_text() == whiteboard("ring_all_reduce")


def test_the_list_has_every_name_with_the_lines_of_both_forms(capsys):
    code, out, _ = copy(capsys, "--list")
    assert (code, out) == (0, listing() + "\n")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    lines = len(forms()["ring_all_reduce"].read_text().splitlines())
    modules = len(needed("xtrain.comm.ring", SOURCE)[0])
    assert rows["ring_all_reduce"] == [str(lines), str(modules), RING]
    assert rows.keys() >= forms().keys()
    references = set(re.findall(r"xtrain\.\S+:\w+", out))
    assert references == set(library().values())


def test_every_public_name_of_a_lecture_is_on_the_list():
    names = library()
    assert {"ring_all_reduce", "DistributedDataParallel", "AdamW"} <= names.keys()
    assert {"ZeroOptimizer", "FullyShardedDataParallel", "send"} <= names.keys()


def test_it_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from xtrain import cli\n"
        "sys.exit(cli.main(['copy', 'ring_all_reduce']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, whiteboard("ring_all_reduce"))
