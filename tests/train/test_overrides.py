"""Options over a recipe: every value and error, help, and round trips."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xtrain.comm.agreement import problem_of
from xtrain.model import RopeScaling
from xtrain.plan import Layout
from xtrain.train.loading import load_recipe
from xtrain.train.options import options_of
from xtrain.train.overrides import help_text, overridden
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Checkpoint, Data, Log, OptimizerSpec, SampleSpec
from xtrain.train.saved import from_json, from_text, show, to_json
from xtrain.train.values import check_types, fits, read_value, show_value, type_name

OVERRIDDEN = "xtrain.train.overrides:overridden"
HELP = "xtrain.train.overrides:help_text"
SHOW = "xtrain.train.saved:show"
SAVED = "xtrain.train.saved:from_json"
BASE = load_recipe("bytes")
EXPERTS = load_recipe("tiny-experts")
SCALED = dataclasses.replace(
    BASE,
    model=dataclasses.replace(BASE.model, rope_scaling=RopeScaling(factor=4.0)),
)


@pytest.mark.verifies(OVERRIDDEN)
@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--steps=5"], "steps", 5),
        (["--steps", "5"], "steps", 5),
        (["--steps=1_000"], "steps", 1000),
        (["--steps=1e6"], "steps", 10**6),
        (["--steps=1.5e3"], "steps", 1500),
        (["--steps=5", "--steps=6"], "steps", 6),
        (["--dtype=bfloat16"], "dtype", "bfloat16"),
        (["--max_norm=2"], "max_norm", 2.0),
        (["--max-norm=1e-2"], "max_norm", 0.01),
        (["--max_norm=none"], "max_norm", None),
        (["--max_norm", "None"], "max_norm", None),
        (["--compile"], "compile", True),
        (["--compile=yes"], "compile", True),
        (["--compile", "--no-compile"], "compile", False),
        (["--no-compile", "--compile=1"], "compile", True),
        (["--compile=FALSE"], "compile", False),
        (["--layout.tensor=2"], "layout.tensor", 2),
        (["--no-layout.reshard_after_forward"], "layout.reshard_after_forward", False),
        (["--layout.sequence-parallel"], "layout.sequence_parallel", True),
        (["--data.path", "a b"], "data.path", "a b"),
        (["--data.path=a=b"], "data.path", "a=b"),
        (["--data.path=none"], "data.path", None),
        (['--data.path="none"'], "data.path", "none"),
        (['--sample.prompt="a\\nb"'], "sample.prompt", "a\nb"),
        (['--sample.prompt="a" or "b"'], "sample.prompt", '"a" or "b"'),
        (["--sample.prompt=-- a"], "sample.prompt", "-- a"),
        (["--optimizer.betas=0.8,0.9"], "optimizer.betas", (0.8, 0.9)),
        (["--optimizer.betas", "(0, 0.9)"], "optimizer.betas", (0.0, 0.9)),
        (["--optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
        (
            ["--model.rope_scaling.factor=2"],
            "model.rope_scaling",
            RopeScaling(factor=2),
        ),
        (["--model.qk_norm"], "model.qk_norm", True),
    ],
)
def test_values(words: list[str], name: str, value: Any) -> None:
    changed: Any = overridden(BASE, words)
    part, _, last = name.rpartition(".")
    found = getattr(getattr(changed, part) if part else changed, last)
    assert found == value and type(found) is type(value)
    rest = {last: getattr(getattr(BASE, part) if part else BASE, last)}
    back = dataclasses.replace(getattr(changed, part) if part else changed, **rest)
    assert (dataclasses.replace(changed, **{part: back}) if part else back) == BASE


@pytest.mark.verifies(OVERRIDDEN)
def test_without_options_it_is_the_same() -> None:
    assert overridden(BASE, []) is BASE


@pytest.mark.verifies(OVERRIDDEN)
def test_many_at_once() -> None:
    """The first and the last alone would break a rule."""
    words = (
        "--layout.expert=4 --layout.data=4 --global_batch=64 --layout.micro_batches=16"
    )
    found = overridden(EXPERTS, words.split())
    assert found.layout == Layout(data=4, expert=4, micro_batches=16)
    assert found.batch == 64
    for word in words.split()[::3]:
        assert problem_of(partial(overridden, EXPERTS, [word])) is not None


@pytest.mark.verifies(OVERRIDDEN)
def test_each_class_is_checked_once() -> None:
    made: list[tuple[str, int, int]] = []

    @dataclass(frozen=True, kw_only=True)
    class Inner:
        low: int = 0
        high: int = 1

        def __post_init__(self) -> None:
            made.append(("inner", self.low, self.high))

    @dataclass(frozen=True, kw_only=True)
    class Outer:
        size: int = 2
        inner: Inner = field(default_factory=Inner)

        def __post_init__(self) -> None:
            made.append(("outer", self.inner.low, self.size))

    outer = Outer()
    made.clear()
    overridden(outer, ["--inner.low=5", "--size=4", "--inner.high=9"])
    assert made == [("inner", 5, 9), ("outer", 5, 4)]
    made.clear()
    overridden(outer, ["--inner.low=5"])
    assert made == [("inner", 5, 1), ("outer", 5, 2)]


@pytest.mark.verifies(OVERRIDDEN)
def test_what_a_class_derives_is_derived_again() -> None:
    found = overridden(BASE, ["--model.hidden_size=192"]).model
    assert BASE.model.head_dim == 8 and found.head_dim == 16
    found = overridden(BASE, ["--model.num_attention_heads=6"]).model
    assert (found.head_dim, found.num_key_value_heads) == (16, 6)
    kept = overridden(BASE, ["--model.num_key_value_heads=4"])
    found = overridden(kept, ["--model.num_attention_heads=24"]).model
    assert (found.head_dim, found.num_key_value_heads) == (4, 4)
    found = overridden(kept, ["--model.num_key_value_heads=none"]).model
    assert found == BASE.model


@pytest.mark.verifies(OVERRIDDEN)
def test_a_part_that_may_be_none() -> None:
    assert overridden(SCALED, ["--model.rope_scaling=none"]) == BASE
    assert overridden(BASE, ["--model.rope-scaling.factor=4"]) == SCALED
    found = overridden(SCALED, ["--model.rope_scaling.low_freq_factor=2"])
    assert found.model.rope_scaling == RopeScaling(factor=4.0, low_freq_factor=2.0)


@pytest.mark.verifies(OVERRIDDEN)
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--steps=x", "--steps='x' is not of type int"),
        ("--steps=1.5", "--steps='1.5' is not of type int"),
        ("--steps=2.0", "--steps='2.0' is not of type int"),
        ("--steps=1.5e0", "--steps='1.5e0' is not of type int"),
        ("--steps=1e400", "--steps='1e400' is not of type int"),
        ("--steps=e", "--steps='e' is not of type int"),
        ("--steps=none", "--steps='none' is not of type int"),
        ("--steps=true", "--steps='true' is not of type int"),
        ("--steps=", "--steps='' is not of type int"),
        ("--max_norm=big", "--max_norm='big' is not of type float or none"),
        ("--max_norm=nan", "--max_norm='nan' is not of type float or none"),
        ("--optimizer.lr=inf", "--optimizer.lr='inf' is not of type float"),
        ("--compile=maybe", "--compile='maybe' is not of type true or false"),
        (
            "--dtype=float16",
            "--dtype='float16' is not of type one of float64, float32, bfloat16",
        ),
        (
            "--optimizer.betas=0.9",
            "--optimizer.betas='0.9' is not of type float,float",
        ),
        (
            "--optimizer.betas=0.9,x",
            "--optimizer.betas='0.9,x' is not of type float,float",
        ),
        (
            "--optimizer.betas=[0.9",
            "--optimizer.betas='[0.9' is not of type float,float",
        ),
        ("--steps", "--steps has no value, of type int"),
        ("--data.path --steps=3", "--data.path has no value, of type text or none"),
        ("--model.rope_scaling", "--model.rope_scaling has no value, of type none"),
        ("steps=3", "unexpected 'steps=3': options are --name=value"),
        ("--compile false", "unexpected 'false': options are --name=value"),
        ("-s 3", "unexpected '-s': options are --name=value"),
        ("--", "unexpected '--': options are --name=value"),
        (
            "--layout.tensr=2",
            "unknown option --layout.tensr: did you mean --layout.tensor?",
        ),
        ("--tensor=2", "unknown option --tensor: did you mean --layout.tensor?"),
        ("--lr=1", "unknown option --lr: did you mean --optimizer.lr?"),
        ("--step=1", "unknown option --step: did you mean --steps?"),
        ("--no-compil", "unknown option --no-compil: did you mean --no-compile?"),
        ("--no-steps", "unknown option --no-steps: did you mean --steps?"),
        (
            "--every=1",
            "unknown option --every: did you mean --log.every or --sample.every or "
            "--evaluate.every?",
        ),
        ("--xyzzy=1", "unknown option --xyzzy: --help lists all"),
        ("--=1", "unknown option --: --help lists all"),
        (
            f"--{'x' * 50}=1",
            f"unknown option --{'x' * 37}...: --help lists all",
        ),
        (
            "--layout.tensor.size=2",
            "unknown option --layout.tensor.size: did you mean --layout.tensor?",
        ),
        (
            "--evaluate=2",
            "--evaluate takes no value: it is a group of options, --evaluate.every, "
            "--evaluate.batches",
        ),
        (
            "--model.rope_scaling=2",
            "--model.rope_scaling='2' is not none: it is a group of options, "
            "--model.rope_scaling.factor, --model.rope_scaling.low_freq_factor, "
            "--model.rope_scaling.high_freq_factor, "
            "--model.rope_scaling.original_max_position_embeddings",
        ),
        (
            "--model.rope_scaling.factor=2 --model.rope_scaling=none",
            "--model.rope_scaling.factor and --model.rope_scaling=none exclude each "
            "other",
        ),
        ("--steps=0", "steps=0 is not an int of at least 1"),
        ("--layout.data=0", "layout: data=0 is not an int of at least 1"),
        (
            "--model.rope_scaling.factor=-1",
            "model.rope_scaling: factor=-1.0 is not a finite number above 0",
        ),
        (
            "--checkpoint.every=5",
            "checkpoint: every=5 without a folder for checkpoints",
        ),
    ],
)
def test_errors(words: str, problem: str) -> None:
    assert problem_of(partial(overridden, BASE, words.split())) == problem


@pytest.mark.verifies(OVERRIDDEN)
def test_a_group_names_all_its_options() -> None:
    found = problem_of(partial(overridden, BASE, ["--layout=2"]))
    for one in dataclasses.fields(Layout):
        assert f"--layout.{one.name}" in found


@pytest.mark.verifies(HELP)
@pytest.mark.parametrize("recipe", [BASE, EXPERTS, SCALED])
def test_help_has_every_option_with_its_default(recipe: Recipe) -> None:
    lines = help_text(recipe).splitlines()
    assert max(map(len, lines)) <= 88
    for line in show(recipe).splitlines():
        name, _, value = line.partition(" = ")
        place = lines.index(f"  --{name}={value}")
        assert lines[place + 1].startswith("      ")
    listed = re.findall(r"^  --([\w.]+)=", help_text(recipe), re.MULTILINE)
    assert listed == [option.name for option in options_of(recipe)]


@pytest.mark.verifies(HELP)
def test_help_of_some_options() -> None:
    text = help_text(BASE)
    for wanted in (
        "run:\n  --steps=320\n      Updates of the weights in the whole run. (int)\n",
        "\n\nlayout:\n  --layout.data=1\n      Ranks with batches of their own; "
        "`expert` divides it. (int)\n",
        "  --compile=false\n      Layers go through torch.compile. (true or false)\n",
        "  --model.rope_scaling=none\n      Llama 3.1's stretched rotary positions. "
        "(none, or its own options)\n\nmodel.rope_scaling:\n",
        "  --model.rope_scaling.factor=8.0\n",
        "  --optimizer.betas=0.9,0.95\n",
        "      One stream that is cut every `sequence` tokens, or documents packed "
        "whole. (one of\n      stream, documents)\n",
    ):
        assert wanted in text
    assert "--model.rope_scaling=...\n" in help_text(SCALED)


@pytest.mark.verifies(SHOW)
def test_show_has_every_value() -> None:
    lines = show(BASE).splitlines()
    assert show(BASE).endswith("\n") and help_text(BASE).endswith("\n")
    assert "steps = 320" in lines and "layout.tensor = 1" in lines
    assert "model.rope_scaling = none" in lines
    assert "data.path = none" in lines and "optimizer.betas = 0.9,0.95" in lines
    assert not any("rope_scaling.factor" in line for line in lines)
    scaled = show(SCALED).splitlines()
    assert "model.rope_scaling.factor = 4.0" in scaled
    assert "model.rope_scaling = none" not in scaled


whole = st.integers(1, 10**6)
texts = st.one_of(st.none(), st.text(min_size=1, max_size=8), st.sampled_from(
    ["none", "None", '"', '"a"', '"none"', " a ", "a\nb", "# a", "a=b", "\u2028", "é",
     "--steps=2", "\ud800", "true", "[1]"]))  # fmt: skip
shares = st.floats(0, 1, exclude_max=True)
optional = st.one_of(st.none(), whole)


@st.composite
def recipes(draw: Any) -> Recipe:
    low = st.floats(0.5, 2)
    scaling = st.builds(RopeScaling, factor=st.floats(1, 100), low_freq_factor=low)
    base = draw(st.sampled_from([BASE, EXPERTS]))
    model = dataclasses.replace(
        base.model,
        rope_scaling=draw(st.one_of(st.none(), scaling)),
        sliding_window=draw(optional),
        rms_norm_eps=draw(st.floats(1e-12, 1)),
        qk_norm=draw(st.booleans()),
    )
    data = st.builds(
        Data, path=texts, validation=texts, shuffle=st.booleans(), sequence=st.just(144)
    )
    optimizer = st.builds(
        OptimizerSpec,
        kind=st.sampled_from(["adamw", "muon"]),
        lr=st.floats(1e-300, 1e300),
        betas=st.tuples(shares, shares),
    )
    kept = st.builds(Checkpoint, folder=st.just("a"), keep=optional, resume=texts)
    tensor = st.sampled_from([1, 2, 3, 4])
    return Recipe(
        model=model,
        steps=draw(whole),
        seed=draw(st.integers(0, 2**62)),
        max_norm=draw(st.one_of(st.none(), st.floats(1e-9, 1e9))),
        compile=draw(st.booleans()),
        layout=draw(st.builds(Layout, tensor=tensor, sequence_parallel=st.booleans())),
        data=draw(data),
        optimizer=draw(optimizer),
        log=draw(st.builds(Log, jsonl=texts, every=whole)),
        checkpoint=draw(kept),
        sample=draw(st.builds(SampleSpec, prompt=texts, temperature=shares)),
    )


@pytest.mark.verifies(SHOW, OVERRIDDEN)
@settings(max_examples=50)
@given(recipes(), st.sampled_from([BASE, SCALED, EXPERTS]))
@example(SCALED, BASE)
@example(BASE, SCALED)
def test_what_is_shown_reads_back(recipe: Recipe, other: Recipe) -> None:
    """Over any other recipe, as every value is given."""
    assert from_text(show(recipe), other) == recipe


@pytest.mark.verifies(SAVED)
@settings(max_examples=50)
@given(recipes())
@example(SCALED)
def test_what_is_saved_reads_back(recipe: Recipe) -> None:
    text = to_json(recipe)
    assert from_json(text, Recipe) == recipe
    assert json.loads(text)["version"] == 1


def test_text_may_have_comments() -> None:
    found = from_text("# mine\n\n steps = 3\nlayout.tensor=2\n", BASE)
    assert found == overridden(BASE, ["--steps=3", "--layout.tensor=2"])
    assert problem_of(partial(from_text, "steps", BASE)) == (
        "line 'steps' is not of the form name = value"
    )
    assert problem_of(partial(from_text, "step = 3", BASE)) == (
        "unknown option --step: did you mean --steps?"
    )


def saved(**changes: Any) -> str:
    """A saved recipe with values put at dotted names; one that is ... is taken away."""
    data = json.loads(to_json(BASE))
    for name, value in changes.items():
        *parts, last = name.split("__")
        branch = data
        for part in parts:
            branch = branch[part]
        if value is ...:
            del branch[last]
        else:
            branch[last] = value
    return json.dumps(data)


@pytest.mark.verifies(SAVED)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "not JSON: Expecting value: line 1 column 2 (char 1)"),
        ("[]", "not a saved recipe: it has no version and recipe"),
        (saved(version=...), "not a saved recipe: it has no version and recipe"),
        (saved(recipe=...), "not a saved recipe: it has no version and recipe"),
        (saved(version=2), "version=2, but this xtrain reads 1"),
        (saved(version="1"), "version='1', but this xtrain reads 1"),
        (saved(recipe=3), "recipe=3 is not an object"),
        (saved(recipe__layout=3), "layout=3 is not an object"),
        (saved(recipe__layout=None), "layout=None is not an object"),
        (
            saved(recipe__layout__tensr=3),
            "unknown field layout.tensr: did you mean layout.tensor?",
        ),
        (saved(recipe__xyzzy=3), "unknown field xyzzy"),
        (saved(recipe__steps="3"), "steps='3' is not of type int"),
        (saved(recipe__steps=None), "steps=None is not of type int"),
        (
            saved(recipe__layout__offload=1),
            "layout.offload=1 is not of type true or false",
        ),
        (
            saved(recipe__optimizer__betas=[0.9]),
            "optimizer.betas=(0.9,) is not of type float,float",
        ),
        (saved(recipe__optimizer__lr=10**400), None),
        (saved(recipe__model=...), "model must be given: there is no default"),
        (
            saved(recipe__model__vocab_size=...),
            "model.vocab_size must be given: there is no default",
        ),
        (
            saved(recipe__layout__data=0),
            "layout: data=0 is not an int of at least 1",
        ),
        (
            saved(recipe__model__rope_scaling={"factor": -1.0}),
            "model.rope_scaling: factor=-1.0 is not a finite number above 0",
        ),
    ],
)
def test_saved_recipes_that_are_refused(text: str, problem: str | None) -> None:
    found = problem_of(partial(from_json, text, Recipe))
    if problem is None:
        assert found.startswith("optimizer.lr=1000") and found.endswith("of type float")
    else:
        assert found == problem


@pytest.mark.verifies(SAVED)
def test_an_older_recipe_has_defaults_for_what_it_lacks() -> None:
    text = saved(recipe__sample=..., recipe__log__every=..., recipe__max_norm=...)
    older = dataclasses.replace(BASE, log=Log(), sample=SampleSpec())
    assert from_json(text, Recipe) == older


@given(st.integers() | st.none())
@example(10**30)
def test_whole_numbers_read_back(value: int | None) -> None:
    assert read_value(show_value(value, int | None), int | None) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_read_back(value: float) -> None:
    assert read_value(show_value(value, float), float) == value


@given(st.text() | st.none())
def test_texts_read_back(value: str | None) -> None:
    text = show_value(value, str | None)
    assert read_value(text, str | None) == value
    assert "\n" not in text and text.strip() == text


@given(st.lists(st.text()), st.lists(st.integers()))
def test_tuples_read_back(words: list[str], numbers: list[int]) -> None:
    for value, kind in ((tuple(words), str), (tuple(numbers), int)):
        hint = tuple[kind, ...]  # type: ignore[valid-type]
        assert read_value(show_value(value, hint), hint) == value
        assert fits(value, hint)


def test_types_in_words() -> None:
    assert type_name(tuple[int, ...]) == "int,..."
    assert type_name(tuple[int, float]) == "int,float"
    assert type_name(Literal["a", 1]) == "one of a, 1"
    assert type_name(float | None) == "float or none"


@pytest.mark.parametrize("hint", [list[int], dict, int | str, bytes])
def test_types_that_no_option_has(hint: Any) -> None:
    with pytest.raises(TypeError, match="the type of an option"):
        type_name(hint)


@pytest.mark.parametrize(
    ("value", "hint", "fit"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (True, float, False),
        ("1", float, False),
        (None, float, False),
        (float("nan"), float, False),
        (10**400, float, False),
        (1, bool, False),
        (None, int, False),
        (None, int | None, True),
        ("a", Literal["a"], True),
        (True, Literal[1], False),
        ((1,), tuple[int, int], False),
        ([1, 2], tuple[int, int], False),
        ((1, 2), tuple[int, int], True),
        (Layout(), Layout, True),
        (1, Layout, False),
    ],
)
def test_fits(value: Any, hint: Any, fit: bool) -> None:
    assert fits(value, hint) is fit


def test_a_part_of_another_class_is_refused() -> None:
    @dataclass(frozen=True)
    class Other:
        layout: Layout
        more: Layout | None = None

        def __post_init__(self) -> None:
            check_types(self)

    Other(Layout(), Layout())
    assert problem_of(partial(Other, 3)) == "layout=3 is not of type Layout"
    assert (
        problem_of(partial(Other, Layout(), 3))
        == "more=3 is not of type Layout or none"
    )
