"""A copy has every name that it uses, and nothing of ours to import."""

import builtins
import subprocess
import symtable
import sys
from pathlib import Path

import pytest

from xtrain.copying import CopyError, standalone
from xtrain_docs import authored

EMBEDDED = authored.embedded()
WHOLE = sorted({f"{m}:{n.split('.')[0]}" for m, n in (r.split(":") for r in EMBEDDED)})


class Toy:
    """A package of planted cases."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "toy").mkdir()
        (root / "toy/__init__.py").write_text("")

    def write(self, **modules: str) -> None:
        for name, text in modules.items():
            (self.root / f"toy/{name}.py").write_text(text)

    def copy(self, reference: str) -> str:
        return standalone(f"toy.{reference}", self.root)

    def run(self, reference: str) -> dict:
        scope: dict = {"__name__": "copied"}
        exec(self.copy(reference), scope)
        return scope


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


RING = """from toy.steps import shift
from toy.steps import fold as combine

STEPS = 2


def ring(values, times=STEPS):
    for step in range(times):
        values[:] = shift(values)
    return combine(values)


class Wheel:
    def turn(self):
        return ring([1, 2])
"""
STEPS = """import math
from collections import deque


def shift(values):
    turned = deque(values)
    turned.rotate(1)
    return list(turned)


def fold(values):
    return math.fsum(values)
"""


def test_runs_in_a_fresh_interpreter_without_the_package(toy, tmp_path):
    toy.write(ring=RING, steps=STEPS)
    path = tmp_path / "copied.py"
    path.write_text(toy.copy("ring:ring") + "\nprint(ring([1.0, 2.0, 4.0]))\n")
    done = subprocess.run(
        [sys.executable, "-I", path], capture_output=True, text=True, check=False
    )
    assert done.stdout == "7.0\n", done.stderr


def test_names_follow_what_they_need_and_a_renamed_one_keeps_its_name(toy):
    toy.write(ring=RING, steps=STEPS)
    code = toy.copy("ring:Wheel.turn")
    assert code.index("def shift") < code.index("def ring") < code.index("class Wheel")
    assert code.index("def fold") < code.index("combine = fold")


def test_names_that_one_statement_defines_come_with_it_once(toy):
    toy.write(
        tuples="ONE, (TWO, *REST) = 1, (2, 3)\nTHREE = FOUR = 7\nTHREE += 1\n\n\n"
        "def total():\n    return ONE + TWO + sum(REST) + THREE + FOUR\n"
    )
    code = toy.copy("tuples:total")
    assert code.count("ONE, (TWO, *REST)") == 1
    assert toy.run("tuples:total")["total"]() == 21


BINDINGS = """import contextlib
import json as coder

with contextlib.nullcontext(4) as four:
    inside = four + 1
for number in range(3):
    pass
if (walrus := number + 5) > 6:
    choice = "large"
else:
    choice = "small"
try:
    import missing_module_of_nobody
except ImportError as error:
    missing_module_of_nobody = None
TABLE = {}
TABLE["a"] = 1
TABLE.update(b=2)
while number:
    number -= 1


def seen():
    table = coder.loads(coder.dumps(TABLE))
    return four, inside, number, walrus, choice, missing_module_of_nobody, table
"""


def test_names_count_that_with_for_if_try_and_while_define(toy):
    toy.write(bindings=BINDINGS)
    seen = toy.run("bindings:seen")["seen"]()
    assert seen == (4, 5, 0, 7, "large", None, {"a": 1, "b": 2})


SCOPES = """
def send(): raise_this
def recv(): raise_this
def value(): raise_this
def item(): raise_this
def held(): raise_this
size = 3


class Shape:
    size = size  # the module's
    held = 1

    def area(self, send, *recv, held=2, **value):
        area = [item for item in recv if (kept := item)]
        return send, area, held, value, kept, (lambda item: item)(self.size)


class Later:
    size = 5
    twice = size
"""


def test_parameters_locals_and_what_a_class_defines_are_no_names_of_the_module(toy):
    toy.write(scopes=SCOPES)
    code = toy.copy("scopes:Shape")
    assert "raise_this" not in code
    assert "size = 3" in code
    shape = toy.run("scopes:Shape")["Shape"]()
    assert shape.area(1, 2, 3, x=4) == (1, [2, 3], 2, {"x": 4}, 3, 3)
    assert "size = 3" not in toy.copy("scopes:Later")


ANNOTATIONS = """from typing import TYPE_CHECKING, Callable, Literal, cast

if TYPE_CHECKING:
    from toy.far import Far


class Near: ...


class InAlias: ...


class InCast: ...


Alias = Callable[["InAlias"], Literal["nobody"]]


def use(far: "Far", near: "list[Near]", how: Alias) -> "Literal['no', 'name']":
    return cast("InCast", far)
"""


def test_names_in_annotations_are_needed_in_quotes_too(toy):
    toy.write(annotations=ANNOTATIONS, far="class Far: ...\n")
    scope = toy.run("annotations:use")
    assert {"Far", "Near", "InAlias", "InCast", "Alias"} <= scope.keys()


IMPORT_TIME = """class Base:
    def children(self):
        return [Child, TABLE]


def register(function):
    return helper(function)


def helper(function):
    return function


class Child(Base):
    @register
    def method(self, base: Base = Base()):
        return base


TABLE = {"child": Child}
"""


def test_what_is_used_at_import_stands_above_also_in_a_circle(toy):
    toy.write(circle=IMPORT_TIME)
    for name in ("Base", "Child", "TABLE"):
        scope = toy.run(f"circle:{name}")
        assert scope["TABLE"] == {"child": scope["Child"]}


def test_decorators_and_defaults_come_first_with_all_that_they_call(toy):
    toy.write(
        made="from toy.zero import top\n\nZ = 5\n\n\n"
        "@(lambda f: f(top()))\ndef made(value):\n    return value + Z\n",
        zero="def low():\n    return 4\n\n\ndef top(n=None):\n    return n or low()\n",
    )
    assert toy.run("made:made")["made"] == 9


def test_two_different_things_of_one_name_are_refused(toy):
    toy.write(
        ring=RING,
        steps=STEPS,
        other="def shift(values):\n    return values\n",
        clash="from toy.ring import ring\nfrom toy.other import shift\n\n\n"
        "def both(v):\n    return ring(shift(v))\n",
        imports="from toy.steps import fold\nfrom cmath import exp as math\n\n\n"
        "def both(v):\n    return fold([math(v)])\n",
    )
    with pytest.raises(CopyError, match="two modules define 'shift': toy"):
        toy.copy("clash:both")
    with pytest.raises(CopyError, match="two modules define 'math'"):
        toy.copy("imports:both")


UNRESOLVED = {
    "nowhere": ("", "return nowhere()"),
    "in_quotes": ("", "x: 'nowhere' = 1"),
    "star": ("from toy.steps import *\n", "return nowhere"),
    "import_of_nothing": ("from toy.steps import nowhere\n", "return nowhere"),
    "all_is_no_definition": ("__all__ = ['nowhere']\n", "return nowhere"),
    "a_file": ("", "return __file__"),
}


@pytest.mark.parametrize("case", UNRESOLVED)
def test_a_name_that_nothing_defines_is_refused(toy, case):
    above, body = UNRESOLVED[case]
    toy.write(steps=STEPS, broken=f"{above}\n\ndef broken():\n    {body}\n")
    name = "__file__" if case == "a_file" else "nowhere"
    with pytest.raises(CopyError, match=f"has no '{name}'"):
        toy.copy("broken:broken")


@pytest.mark.parametrize(
    ("above", "used"),
    [
        ("import toy.steps\n", "toy.steps.shift"),
        ("import toy.steps as s\n", "s.shift"),
        ("from toy import steps\n", "steps.shift"),
        ("from . import steps\n", "steps.shift"),
    ],
)
def test_a_whole_module_of_ours_is_refused(toy, above, used):
    toy.write(steps=STEPS, whole=f"{above}\n\ndef f(v):\n    return {used}(v)\n")
    with pytest.raises(CopyError, match="imports the module toy.steps; import the na"):
        toy.copy("whole:f")


def test_an_import_of_ours_inside_a_function_is_refused(toy):
    toy.write(
        steps=STEPS,
        inner="def f(v):\n    from .steps import shift\n\n    return shift(v)\n",
    )
    with pytest.raises(CopyError, match=r"toy.inner, line 2: .* import it at the top"):
        toy.copy("inner:f")


def test_what_needs_each_other_at_import_is_refused(toy):
    toy.write(
        one="from toy.two import Two\n\n\nclass One(Two): ...\n",
        two="from toy.one import One\n\n\nclass Two(One): ...\n",
    )
    with pytest.raises(CopyError, match="need each other when they run: toy.two line"):
        toy.copy("one:One")


@pytest.mark.parametrize("reference", ["nothing:f", "steps:nothing", "steps", ":f"])
def test_what_does_not_exist_is_refused(toy, reference):
    toy.write(steps=STEPS)
    with pytest.raises(CopyError):
        toy.copy(reference)


def undefined(code: str) -> set[str]:
    """Names that some scope of the code takes from its module, which has none."""
    table = symtable.symtable(code, "copy", "exec")
    tables, wanted = [table], set()
    while tables:
        inner = tables.pop()
        tables += inner.get_children()
        at_top = inner.get_type() == "module"
        for symbol in inner.get_symbols():
            if symbol.is_referenced() and (at_top or symbol.is_global()):
                wanted.add(symbol.get_name())
    given = {
        s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()
    }
    return {n for n in wanted - given - {"__name__"} if not hasattr(builtins, n)}


def test_an_undefined_name_is_found_in_any_scope():
    code = "import a\nb = 1\n\n\nclass C:\n    def f(self):\n        return [a, b, d]\n"
    assert undefined(code) == {"d"}


@pytest.mark.parametrize("reference", WHOLE)
def test_every_copy_of_the_site_runs_and_has_all_its_names(reference, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "xtrain"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "xtrain", None)  # importing it now raises
    scope: dict = {"__name__": "copied"}
    module = type(sys)("copied")
    monkeypatch.setitem(sys.modules, "copied", module)  # dataclasses look there
    code = standalone(reference)
    exec(compile(code, f"<{reference}>", "exec"), scope)
    assert reference.split(":")[1] in scope
    assert undefined(code) == set()
