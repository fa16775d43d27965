"""What "copy with imports" hands out runs on its own."""

import subprocess
import sys

import pytest

from xtrain_docs import authored
from xtrain_docs.standalone import standalone
from xtrain_docs.symbols import SymbolError

EMBEDDED = sorted(r for r in authored.embedded() if "." not in r.split(":")[1])


def test_runs_in_a_fresh_interpreter_without_the_package(toy):
    code = standalone("toy.ring:ring") + "\nprint(ring([1.0, 2.0, 4.0]))\n"
    path = toy.write("copied.py", code)
    done = subprocess.run(
        [sys.executable, "-I", path], capture_output=True, text=True, check=False
    )
    assert done.stdout == "7.0\n", done.stderr


def test_a_renamed_import_keeps_its_local_name(toy):
    assert "combine = fold" in standalone("toy.ring:ring")


def test_names_follow_what_they_need(toy):
    code = standalone("toy.ring:Wheel")
    assert code.index("def shift") < code.index("def ring") < code.index("class Wheel")


def test_names_that_one_statement_defines_come_with_it_once(toy):
    toy.write(
        "src/toy/tuples.py",
        "ONE, (TWO, *REST) = 1, (2, 3)\nTHREE = FOUR = 7\n\n\n"
        "def total():\n    return ONE + TWO + sum(REST) + THREE + FOUR\n",
    )
    code = standalone("toy.tuples:total")
    assert code.count("ONE, (TWO, *REST)") == 1
    scope: dict = {}
    exec(code, scope)
    assert scope["total"]() == 20


def test_two_different_helpers_of_one_name_are_refused(toy):
    toy.write("src/toy/other.py", "def shift(values):\n    return values\n")
    toy.write(
        "src/toy/clash.py",
        "from toy.ring import ring\nfrom toy.other import shift\n\n\n"
        "def both(v):\n    return ring(shift(v))\n",
    )
    with pytest.raises(SymbolError, match="two modules define 'shift'"):
        standalone("toy.clash:both")


def test_importing_a_whole_module_of_ours_is_refused(toy):
    toy.write(
        "src/toy/whole.py",
        "import toy.steps\n\n\ndef f(v):\n    return toy.steps.shift(v)\n",
    )
    with pytest.raises(SymbolError, match="import the names"):
        standalone("toy.whole:f")


@pytest.mark.parametrize("reference", EMBEDDED)
def test_every_copy_on_the_site_runs_without_xtrain(reference, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "xtrain"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "xtrain", None)  # importing it now raises
    scope: dict = {"__name__": "copied"}
    module = type(sys)("copied")
    monkeypatch.setitem(sys.modules, "copied", module)  # dataclasses look there
    exec(compile(standalone(reference), f"<{reference}>", "exec"), scope)
    assert reference.split(":")[1] in scope
