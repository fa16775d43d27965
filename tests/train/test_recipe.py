"""Recipes: what they refuse, those that come along, and how they are found."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from xtrain.comm.agreement import problem_of
from xtrain.model.config import XtrainConfig
from xtrain.plan import Layout
from xtrain.train.loading import load_recipe
from xtrain.train.options import all_help, help_of, options_of
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import (
    Checkpoint,
    Data,
    Evaluate,
    Log,
    OptimizerSpec,
    SampleSpec,
)
from xtrain.train.recipes import BUILT_IN
from xtrain.train.saved import to_json

RECIPE = "xtrain.train.recipe:Recipe"
LOAD = "xtrain.train.loading:load_recipe"
SMALL = XtrainConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
)


@pytest.mark.verifies(RECIPE)
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"steps": 0}, "steps=0 is not an int of at least 1"),
        ({"steps": True}, "steps=True is not of type int"),
        ({"seed": -1}, "seed=-1 is not an int of at least 0"),
        (
            {"dtype": "fp16"},
            "dtype='fp16' is not of type one of float64, float32, bfloat16",
        ),
        ({"device": "tpu"}, "device='tpu' is not of type one of auto, cpu, cuda"),
        ({"max_norm": 0.0}, "max_norm=0.0 is not a finite number above 0"),
        ({"max_norm": math.inf}, "max_norm=inf is not of type float or none"),
        ({"threads": 0}, "threads=0 is not an int of at least 1"),
        ({"compile": 1}, "compile=1 is not of type true or false"),
        ({"global_batch": 0}, "global_batch=0 is not an int of at least 1"),
        ({"data": None}, "data=None is not of type Data"),
        (
            {"global_batch": 5, "layout": Layout(data=3, micro_batches=2)},
            "global_batch=5 is below layout.data=3 x layout.micro_batches=2: each "
            "micro-batch has at least one sequence",
        ),
        (
            {"global_batch": 8, "layout": Layout(micro_batch=4)},
            "global_batch=8 and layout.micro_batch=4: give one of them, the other "
            "follows from it",
        ),
        (
            {"layout": Layout(tensor=3)},
            "TP3 ZeRO-0 breaks rules: heads: num_attention_heads=2 is not divisible by "
            "tensor=3; intermediate: intermediate_size=16 is not divisible by "
            "tensor=3; key-heads: num_key_value_heads=2 and tensor=3: one divides the "
            "other",
        ),
        (
            {"data": Data(sequence=6), "layout": Layout(context=2)},
            "CP2 ZeRO-0 breaks rules: sequence: sequence=6 is not divisible by 2 x "
            "context=2: each rank takes two pieces, so that the mask leaves all the "
            "same work",
        ),
        (
            {"data": Data(path="a"), "evaluate": Evaluate(every=5)},
            "evaluate.every=5 with data.path='a': give data.validation, a file to "
            "evaluate on",
        ),
    ],
)
def test_what_a_recipe_refuses(values: dict[str, Any], problem: str) -> None:
    assert problem_of(partial(Recipe, **{"model": SMALL, **values})) == problem


@pytest.mark.parametrize(
    ("part", "values", "problem"),
    [
        (Data, {"sequence": 0}, "sequence=0 is not an int of at least 1"),
        (Data, {"workers": -1}, "workers=-1 is not an int of at least 0"),
        (Data, {"path": ""}, "path='' is empty: give none, or leave it out"),
        (Data, {"path": Path("a")}, None),
        (
            Data,
            {"packing": "none"},
            "packing='none' is not of type one of stream, documents",
        ),
        (Data, {"shuffle": "yes"}, "shuffle='yes' is not of type true or false"),
        (
            OptimizerSpec,
            {"kind": "sgd"},
            "kind='sgd' is not of type one of adamw, muon",
        ),
        (OptimizerSpec, {"lr": 0.0}, "lr=0.0 is not a finite number above 0"),
        (OptimizerSpec, {"eps": -1.0}, "eps=-1.0 is not a finite number above 0"),
        (OptimizerSpec, {"weight_decay": -0.1}, "weight_decay=-0.1 is below 0"),
        (OptimizerSpec, {"balance_rate": -0.1}, "balance_rate=-0.1 is below 0"),
        (OptimizerSpec, {"betas": (0.9, 1.0)}, "betas=(0.9, 1.0) is not in [0, 1)"),
        (OptimizerSpec, {"betas": (0.9,)}, "betas=(0.9,) is not of type float,float"),
        (OptimizerSpec, {"momentum": 1.0}, "momentum=1.0 is not in [0, 1)"),
        (OptimizerSpec, {"ns_steps": 0}, "ns_steps=0 is not an int of at least 1"),
        (Log, {"every": 0}, "every=0 is not an int of at least 1"),
        (Log, {"jsonl": ""}, "jsonl='' is empty: give none, or leave it out"),
        (
            Log,
            {"profile": "5"},
            "profile='5' is not first:last, two steps from 1 on",
        ),
        (
            Log,
            {"profile": "0:3"},
            "profile='0:3' is not first:last, two steps from 1 on",
        ),
        (
            Log,
            {"profile": "5:3"},
            "profile='5:3' is not first:last, two steps from 1 on",
        ),
        (Checkpoint, {"every": 5}, "every=5 without a folder for checkpoints"),
        (
            Checkpoint,
            {"load_hf": ""},
            "load_hf='' is empty: give none, or leave it out",
        ),
        (
            Checkpoint,
            {"save_hf": ""},
            "save_hf='' is empty: give none, or leave it out",
        ),
        (Checkpoint, {"keep": 2}, "keep=2 without a folder for checkpoints"),
        (
            Checkpoint,
            {"folder": "a", "keep": 0},
            "keep=0 is not an int of at least 1",
        ),
        (Checkpoint, {"format": "dcp"}, "format='dcp' is not of type one of xtrain"),
        (Evaluate, {"every": 0}, "every=0 is not an int of at least 1"),
        (Evaluate, {"batches": 0}, "batches=0 is not an int of at least 1"),
        (SampleSpec, {"tokens": 0}, "tokens=0 is not an int of at least 1"),
        (SampleSpec, {"temperature": -1.0}, "temperature=-1.0 is below 0"),
        (SampleSpec, {"every": 0}, "every=0 is not an int of at least 1"),
    ],
)
def test_what_parts_refuse(
    part: type, values: dict[str, Any], problem: str | None
) -> None:
    found = problem_of(partial(part, **values))
    assert found == (problem or f"path={Path('a')!r} is not of type text or none")


def test_values_at_their_limits() -> None:
    OptimizerSpec(weight_decay=0.0, balance_rate=0.0, betas=(0.0, 0.0), momentum=0.0)
    SampleSpec(temperature=0.0)
    Recipe(model=SMALL, layout=Layout(pipeline=2, zero=2))  # the planner refuses it


def test_evaluation_needs_data_of_its_own() -> None:
    """Python's standard library has it; a file needs another one."""
    every = Evaluate(every=5)
    assert Recipe(model=SMALL, evaluate=every).data.path is None
    Recipe(model=SMALL, evaluate=every, data=Data(path="a", validation="b"))
    Recipe(model=SMALL, data=Data(path="a"))


def test_the_profiled_steps() -> None:
    assert Log(profile="3:10").profile_window == (3, 10)
    assert Log(profile="1:1").profile_window == (1, 1)
    assert Log().profile_window is None


@pytest.mark.verifies(RECIPE)
def test_sequences_of_a_step() -> None:
    layout = Layout(data=3, micro_batches=2)
    assert Recipe(model=SMALL, layout=layout, global_batch=7).batch == 7
    layout = Layout(data=3, micro_batches=2, micro_batch=4)
    recipe = Recipe(model=SMALL, layout=layout, data=Data(sequence=10))
    assert recipe.batch == 24 and recipe.tokens == 240


@pytest.mark.verifies(RECIPE)
def test_the_seed_is_that_of_the_weights_too() -> None:
    model = dataclasses.replace(SMALL, seed=5)
    recipe = Recipe(model=model, seed=3)
    assert recipe.config == dataclasses.replace(SMALL, seed=8)
    assert recipe.model == model


@pytest.mark.verifies(RECIPE)
def test_padding_makes_a_vocabulary_divisible() -> None:
    model = dataclasses.replace(SMALL, vocab_size=13, num_attention_heads=4,
                                num_key_value_heads=4, head_dim=2)  # fmt: skip
    recipe = Recipe(model=model, layout=Layout(tensor=2))
    assert recipe.model.padded_vocab_size == 14
    wider = dataclasses.replace(recipe, layout=Layout(tensor=4))
    assert wider.model == dataclasses.replace(model, padded_vocab_size=16)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_field_has_a_help_line(name: str) -> None:
    names, helps = [one.name for one in options_of(load_recipe(name))], all_help(Recipe)
    assert [name for name in names if not helps.get(name)] == []
    assert len(names) > 90
    assert [name for name in names if not helps[name].endswith(".")] == []


def test_help_comes_from_fields_docstrings_and_outer_classes() -> None:
    assert help_of(Layout)["chunks"] == "Virtual stages a rank."
    assert help_of(XtrainConfig)["rope_theta"] == "The base of the rotary frequencies."
    both = help_of(XtrainConfig)["n_group"]
    assert both == help_of(XtrainConfig)["topk_group"]
    assert both.startswith(
        "Experts form `n_group` groups of equal size, and those of a"
    )
    assert help_of(XtrainConfig)["qk_norm"].startswith("Queries and keys")  # a base's
    assert "tensor" not in help_of(Layout)
    found = all_help(Recipe)
    assert found["layout.tensor"] == Recipe.HELP["layout.tensor"]
    assert found["layout.zero"] != help_of(Layout)["zero"]
    assert set(Recipe.HELP) <= set(found)


@dataclasses.dataclass
class Documented:
    """Help in all its places.

    Args:
        one: of the docstring,
            on two lines.

        two, three: after an empty line.

    Raises:
        ValueError: four: is no entry of `Args:`.
    """

    one: int = 1
    two: int = 2
    three: int = 3
    """Under the field, which counts more."""
    four: int = 4


def test_help_of_a_docstring() -> None:
    assert help_of(Documented) == {
        "one": "Of the docstring, on two lines.",
        "two": "After an empty line.",
        "three": "Under the field, which counts more.",
    }


@pytest.mark.verifies(LOAD)
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    "axis", ["data", "tensor", "pipeline", "context", "expert", "micro_batches"]
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_recipes_that_come_along_take_each_axis(
    name: str, axis: str, size: int
) -> None:
    recipe = load_recipe(name)
    if axis == "expert" and not recipe.model.num_local_experts:
        return
    sizes = {axis: size} | ({"data": size} if axis == "expert" else {})
    other = dataclasses.replace(recipe, layout=Layout(**sizes))
    assert other.batch == recipe.batch in (8, 12)


@pytest.mark.verifies(
    "xtrain.train.recipes:dense_bytes", "xtrain.train.recipes:tiny_experts"
)
def test_recipes_that_come_along_are_small() -> None:
    assert load_recipe() == load_recipe("bytes")
    for name in BUILT_IN:
        recipe = load_recipe(name)
        assert 4e5 < recipe.model.parameters < 2e6 and recipe.model.vocab_size == 257


HEAD = """
from xtrain.model.config import XtrainConfig
from xtrain.train.recipe import Recipe
from xtrain.train.loading import load_recipe
"""
ONE = """
def mine():
    return _with(7)

def _with(steps):
    from dataclasses import replace
    return replace(load_recipe(), steps=steps)
"""
OTHER = """
def other():
    return load_recipe("tiny-experts")
"""


@pytest.mark.verifies(LOAD)
def test_a_recipe_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    path.write_text(HEAD + ONE)
    wanted = dataclasses.replace(load_recipe(), steps=7)
    assert load_recipe(str(path)) == load_recipe(f"{path}:mine") == wanted
    path.write_text(HEAD + ONE + OTHER)
    assert load_recipe(f"{path}:mine") == wanted
    assert load_recipe(f"{path}:other") == load_recipe("tiny-experts")


@pytest.mark.verifies(LOAD)
def test_a_recipe_of_a_module() -> None:
    assert load_recipe("xtrain.train.recipes:dense_bytes") == load_recipe("bytes")


@pytest.mark.verifies(LOAD)
def test_a_saved_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    recipe = dataclasses.replace(load_recipe("tiny-experts"), steps=3)
    path.write_text(to_json(recipe))
    assert load_recipe(str(path)) == recipe


@pytest.mark.verifies(LOAD)
def test_a_file_may_have_dataclasses_of_its_own(tmp_path: Path) -> None:
    """With annotations that are text: they are looked up in the file's module."""
    path = tmp_path / "own.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, fields\n"
        "from typing import ClassVar\n" + HEAD + "@dataclass(frozen=True)\n"
        "class Size:\n"
        "    steps: int = 9\n"
        "    unit: ClassVar[str] = 'steps'\n"
        "\n"
        "def mine() -> Recipe:\n"
        "    import dataclasses\n"
        "    return dataclasses.replace(load_recipe(), steps=Size().steps)\n"
    )
    assert load_recipe(str(path)).steps == 9


@pytest.mark.verifies(LOAD)
@pytest.mark.parametrize(
    ("source", "function", "problem"),
    [
        (None, "", "recipe {name}: there is no file {path}"),
        (None, ":f", "recipe {name}: there is no file {path}"),
        (
            HEAD + ONE + OTHER,
            "",
            "{path} has not one public function but 2 (mine, other): give "
            "{path}:function",
        ),
        (
            "x = 1",
            "",
            "{path} has not one public function but 0 (none): give {path}:function",
        ),
        (
            HEAD + ONE,
            ":his",
            "{path} has no function 'his'; its public functions: mine",
        ),
        ("x = 1", ":x", "{path} has no function 'x'; its public functions: none"),
        ("def f(): return 3", "", "recipe {name} returns int, not a Recipe"),
        ("def f(): return {}['a']", "", "recipe {name} raises KeyError: 'a'"),
        (
            "def f(a): return 3",
            "",
            "recipe {name} raises TypeError: f() missing 1 required positional "
            "argument: 'a'",
        ),
        (
            HEAD + "def f(): return load_recipe('dense')",
            "",
            "recipe {name} raises ValueError: no recipe 'dense': There are bytes, "
            "tiny-experts; or give FILE.py:function or package.module:function",
        ),
        ("1 / 0", "", "recipe {name}: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "", "recipe {name}: SystemExit: 3"),
        ("def f(:", "", "recipe {name}: SyntaxError: *"),
        (
            "import no_such_package",
            "",
            "recipe {name}: ModuleNotFoundError: No module named 'no_such_package'",
        ),
    ],
)
def test_files_that_are_no_recipe(
    tmp_path: Path, source: str | None, function: str, problem: str
) -> None:
    path = tmp_path / "my.py"
    if source is not None:
        path.write_text(source)
    found = problem_of(partial(load_recipe, f"{path}{function}"))
    wanted = problem.format(path=path, name=f"{path}{function}")
    if wanted.endswith("*"):
        assert found.startswith(wanted[:-1])
    else:
        assert found == wanted


@pytest.mark.verifies(LOAD)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "byts",
            "no recipe 'byts': did you mean bytes? There are bytes, tiny-experts; or "
            "give FILE.py:function or package.module:function",
        ),
        (
            "no.such:f",
            "recipe no.such:f: ModuleNotFoundError: No module named 'no'",
        ),
        (
            "xtrain.train.recipes:bytes",
            "xtrain.train.recipes has no function 'bytes'; its public functions: "
            "dense_bytes, tiny_experts",
        ),
        ("none.json", "recipe none.json: there is no such file"),
    ],
)
def test_names_that_are_no_recipe(name: str, problem: str) -> None:
    assert problem_of(partial(load_recipe, name)) == problem


@pytest.mark.verifies(LOAD)
def test_a_saved_recipe_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text("{")
    found = problem_of(partial(load_recipe, str(path)))
    assert found.startswith(f"recipe {path}: not JSON: ")
