"""Runs from a model of `transformers` to one: the same weights as its own training.

As in tests/model, `transformers` runs in this process alone, and what it computes in
fp32 is bound to float64.
"""

import dataclasses
import json
import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.model import test_mixtral
from tests.model.test_hf import written
from tests.model.test_mixtral import mixtral  # noqa: F401
from tests.model.test_transformers import (
    PLAIN,
    STRETCHED,
    AllInFloat64,
    built,
    llama,  # noqa: F401  its fixture imports transformers, or skips
)
from xtrain.checkpoint import CheckpointError
from xtrain.checkpoint.pieces import About
from xtrain.cluster.per_rank import replaced
from xtrain.comm.agreement import problem_of
from xtrain.model import hf_save
from xtrain.model.hf_files import write_safetensors
from xtrain.plan import Layout
from xtrain.train import to_hugging_face
from xtrain.train.batches import Batches
from xtrain.train.changes import changed
from xtrain.train.hugging_face import config_of, data_of, options_for
from xtrain.train.loading import load_recipe
from xtrain.train.overrides import help_text, nested, options_given
from xtrain.train.rates import Rate, rate_at
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Checkpoint, Data, OptimizerSpec, SampleSpec
from xtrain.train.run import train
from xtrain.train.sources import samples_of
from xtrain.train.writing import write_tokens

HERE = "xtrain.train.hugging_face:"
END = "xtrain.train.to_hugging_face:"
SAVE = f"{END}save_hf"
RUN = "xtrain.train.run:TrainingRun"
FILL = "xtrain.model.hf_load:fill"
WRITE = ("xtrain.model.hf_save:write_hf", "xtrain.model.hf_save:Collector")
VOCABULARY, STEPS = 25, 3
WORDS = ["</s>", "one", "two", "three", "four", "five", "six", "seven"]
DENSE = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "rope_parameters": PLAIN}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True, "rope_parameters": STRETCHED},
    "mixtral": DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
EXTRAS = {"tokenizer_config.json": "{}", "notes/read.md": "text", "LICENSE": "mine"}
LEFT_OUT = ("pytorch_model.bin", ".cache/x", "old/consolidated.00.pth")


@pytest.fixture(scope="module")
def begun(llama, mixtral, tmp_path_factory):  # noqa: F811
    """Makes folders of one family, once: `in`, `out` after their steps, and tokens."""
    root, made = tmp_path_factory.mktemp("models"), set()

    def make(family: str) -> Path:
        folder = root / family
        if family not in made:
            made.add(family)
            with pytest.MonkeyPatch.context() as patches:
                for module in (*llama.modules, *mixtral.modules):
                    patches.setattr(module, "torch", AllInFloat64())
                patches.setattr(torch.Tensor, "float", torch.Tensor.double)
                make_files(llama, mixtral, family, folder)
        return folder

    return make


def make_files(llama, mixtral, family: str, folder: Path) -> None:  # noqa: F811
    theirs = test_mixtral.built if family == "mixtral" else built
    model = theirs(mixtral if family == "mixtral" else llama, **FAMILIES[family])
    model.save_pretrained(folder / "in")
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (40, 17), generator=generator, device="cpu")
    write_tokens(folder / "tokens", ids, VOCABULARY)
    train_theirs(model, recipe(folder))
    model.save_pretrained(folder / "out")


def recipe(folder: Path, **changes: Any) -> Recipe:
    """From `in`, with the tokens beside it."""
    values: dict[str, Any] = {
        "steps": STEPS, "dtype": "float64", "device": "cpu", "max_norm": None,
        "global_batch": 8, "model": config_of(folder / "in"),
        "optimizer": OptimizerSpec(lr=0.01), "rate": Rate(warmup=2),
        "data": Data(path=str(folder / "tokens"), sequence=12),
        "checkpoint": Checkpoint(load_hf=str(folder / "in")),
    }  # fmt: skip
    return Recipe(**(values | changes))


def train_theirs(model, made: Recipe) -> None:
    """torch's AdamW and cross-entropy on the batches of a recipe."""
    spec, batches = made.optimizer, Batches(samples_of(made.data, 25, 0, False), 8)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    options = {"betas": spec.betas, "eps": spec.eps, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, **options)
    for step in range(made.steps):
        for group in optimizer.param_groups:
            group["lr"] = spec.lr * rate_at(step, made.rate, made.steps)
        logits = model(batches[step].tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batches[step].labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def runs(made: Recipe) -> list[float]:
    return train(made).losses


def trained(world, made: Recipe, out: Path, **kept: Any) -> dict[str, torch.Tensor]:
    """The tensors at the end of a run."""
    kept = {"load_hf": made.checkpoint.load_hf, "save_hf": str(out)} | kept
    made = dataclasses.replace(made, checkpoint=Checkpoint(**kept))
    world(made.layout.gpus).run(runs, made)
    assert not list(out.parent.glob(".partial-*"))
    return written(out)


LAYOUTS = [
    ("llama", Layout()),
    ("llama", Layout(data=3, zero=3, micro_batches=2)),
    ("llama", Layout(data=3, zero=1)),
    ("tied", Layout(data=2, zero=2)),
    ("tied", Layout(tensor=2, data=2, zero=3)),
    ("tied", Layout(tensor=2, sequence_parallel=True)),
    ("llama", Layout(tensor=4)),
    ("llama", Layout(context=2)),
    ("tied", Layout(pipeline=3, micro_batches=3)),
    ("llama", Layout(pipeline=2, data=2, zero=3, micro_batches=2, schedule="zb_h1")),
    ("llama", Layout(pipeline=2, chunks=2, micro_batches=4, schedule="zb_v")),
    ("tied", Layout(pipeline=2, micro_batches=4, schedule="dualpipe")),
    ("llama", Layout(data=4, zero=3, replicate=2)),
    ("mixtral", Layout(data=2, expert=2)),
    ("mixtral", Layout(data=4, expert=2, zero=3)),
    ("mixtral", Layout(data=2, expert=2, tensor=2, zero=1)),
    ("mixtral", Layout(data=2, expert=2, pipeline=2, zero=2, micro_batches=2)),
]


@pytest.mark.verifies(SAVE, RUN, FILL, *WRITE, f"{END}weights_of")
@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_any_layout_ends_with_the_weights_of_their_training(
    world, begun, tmp_path, family, layout
):
    """Every tensor that they would save, after steps of torch's optimizer."""
    folder = begun(family)
    made = recipe(folder, layout=layout)
    found, right = trained(world, made, tmp_path / "out"), written(folder / "out")
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=1e-9,
            atol=1e-11,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.verifies(SAVE, f"{HERE}config_of")
@pytest.mark.parametrize("family", FAMILIES)
def test_they_read_the_result_and_compute_the_same(
    world,
    begun,
    tmp_path,
    llama,  # noqa: F811
    mixtral,  # noqa: F811
    family,
):
    folder, tokens = begun(family), torch.arange(20).view(2, 10)
    trained(world, recipe(folder, layout=Layout(data=2, zero=3)), tmp_path / "out")
    kind, options = llama.model, {}
    if family == "mixtral":  # as their products of groups have no float64
        kind, options = mixtral.model, {"experts_implementation": "eager"}
    mine, right = (
        kind.from_pretrained(path, dtype=torch.float64, **options)
        for path in (tmp_path / "out", folder / "out")
    )
    assert mine.dtype == torch.float64
    same, other = (m.config.to_dict() | {"_name_or_path": ""} for m in (mine, right))
    assert same == other
    torch.testing.assert_close(mine(tokens).logits, right(tokens).logits)


def with_extras(folder: Path, target: Path) -> dict[str, Any]:
    """A copy of `in`, matrices in bfloat16 and norms in fp32, with more than this model
    reads; its config."""
    wide = written(folder / "in").items()
    tensors = {n: t.bfloat16() if t.dim() > 1 else t.float() for n, t in wide}
    for name in ("tokenizer.json", *EXTRAS, *LEFT_OUT):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(EXTRAS.get(name, ""))
    save_file(tensors, target / "model.safetensors", {"format": "pt", "by": "them"})
    values = json.loads((folder / "in" / "config.json").read_text())
    values |= {"dtype": "bfloat16", "bos_token_id": 1, "of_theirs": [1, {"a": None}]}
    (target / "config.json").write_text(json.dumps(values))
    make_tokenizer(target / "tokenizer.json", WORDS)
    return values


def make_tokenizer(path: Path, words: list[str]) -> None:
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="</s>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))


@pytest.mark.verifies(SAVE, f"{END}copy_besides_weights", f"{HERE}data_of")
def test_dtype_entries_and_other_files_are_those_of_the_beginning(
    world, begun, tmp_path
):
    """The text is that of the words of `tokenizer.json`, which nothing else names."""
    source, out, text = tmp_path / "in", tmp_path / "deep" / "out", tmp_path / "text"
    values = with_extras(begun("llama"), source)
    text.write_text("one two three four five six seven " * 60)
    made = recipe(
        begun("llama"), dtype="float32", data=Data(path=str(text), sequence=12),
        layout=Layout(data=2, zero=3),
    )  # fmt: skip
    made = changed(made, {"checkpoint": {"load_hf": str(source)}})
    found = trained(world, made, out)
    dtypes = {name: t.dtype for name, t in written(source).items()}
    assert {name: t.dtype for name, t in found.items()} == dtypes
    assert json.loads((out / "config.json").read_text()) == values
    with safe_open(out / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "by": "them"}
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert names == {*EXTRAS, "tokenizer.json", "config.json", "model.safetensors"}
    assert all((out / name).read_text() == EXTRAS[name] for name in EXTRAS)
    given = dataclasses.replace(made.data, tokenizer=str(source / "tokenizer.json"))
    again = dataclasses.replace(made, data=given)
    assert all(map(torch.equal, trained(world, again, tmp_path / "2").values(),
                   found.values()))  # fmt: skip


@pytest.mark.verifies(SAVE, RUN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_without_files_ends_in_its_own_dtype(world, begun, tmp_path, dtype):
    made = changed(recipe(begun("llama")), {"checkpoint": {"load_hf": None}})
    made = dataclasses.replace(made, dtype=dtype, layout=Layout(pipeline=2))
    found = trained(world, made, tmp_path / "out")
    assert {t.dtype for t in found.values()} == {getattr(torch, dtype)}
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["torch_dtype"] == dtype and config_of(tmp_path / "out") == made.model


@pytest.mark.verifies(RUN, SAVE)
def test_a_run_that_goes_on_reads_its_checkpoint_and_not_the_files(
    world, begun, tmp_path
):
    """Their weights are others by then; the result is that of a run without a stop."""
    folder, source, kept = begun("llama"), tmp_path / "in", str(tmp_path / "kept")
    made = recipe(folder, rate=Rate(kind="constant"))
    right = trained(world, made, tmp_path / "right")
    source.mkdir()
    for path in (folder / "in").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    with_files = changed(made, {"checkpoint": {"load_hf": str(source)}})
    first = dataclasses.replace(with_files, steps=2, layout=Layout(data=2, zero=3))
    trained(world, first, tmp_path / "half", folder=kept)
    tensors = {n: torch.zeros_like(t) for n, t in written(source).items()}
    save_file(tensors, source / "model.safetensors")
    rest = dataclasses.replace(with_files, layout=Layout(pipeline=2, micro_batches=2))
    found = trained(world, rest, tmp_path / "out", folder=kept)
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.verifies(f"{HERE}data_of", "xtrain.train.sources:is_text")
def test_text_and_prompts_have_the_tokenizer_of_the_files(begun, tmp_path):
    folder, text = begun("llama"), str(tmp_path / "text")
    with_extras(folder, tmp_path / "in")
    (tmp_path / "text").write_text("one")
    theirs, tokens = str(tmp_path / "in" / "tokenizer.json"), str(folder / "tokens")
    for data, prompt, expected in (
        ({"path": text}, None, theirs),
        ({"path": tokens, "validation": text}, None, theirs),
        ({"path": tokens}, None, None),
        ({"path": tokens}, "one", theirs),
        ({"path": text, "tokenizer": "mine"}, None, "mine"),
        ({}, None, None),  # the standard library's bytes
        ({"path": str(tmp_path / "gone")}, None, None),
    ):
        made = recipe(folder, data=Data(**data), sample=SampleSpec(prompt=prompt))
        made = changed(made, {"checkpoint": {"load_hf": str(tmp_path / "in")}})
        assert data_of(made).tokenizer == expected
    (tmp_path / "in" / "tokenizer.json").unlink()
    made = changed(made, {"data": {"path": text}})
    assert data_of(made).tokenizer is None


def refuses(made: Recipe, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        train(made)


@pytest.mark.verifies(f"{HERE}found_for", f"{END}check_target", RUN)
def test_what_does_not_fit_is_refused_on_every_rank_before_a_step(
    world, begun, tmp_path
):
    folder, source = begun("llama"), tmp_path / "in"
    with_extras(folder, source)
    make_tokenizer(source / "tokenizer.json", ["</s>", *map(str, range(30))])
    (tmp_path / "text").write_text("one two " * 100)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    for name, files in (("tied", ["config.json"]), ("half", ["model.safetensors"])):
        (tmp_path / name).mkdir()
        for file in files:
            shutil.copy(begun("tied") / "in" / file, tmp_path / name)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    other = dataclasses.replace(config_of(source), rope_theta=7.0)
    text = Data(path=str(tmp_path / "text"), sequence=12)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"load_hf": "nowhere"}, {}, "load_hf=nowhere: .*config.json cannot be read"),
        ({"load_hf": str(tmp_path / "gpt")}, {}, "model_type='gpt2' is none of llama"),
        ({}, {"model": other}, "has rope_theta=500.0, the recipe 7.0"),
        ({}, {"data": text}, r"tokenizer.json has 31 ids, .*vocabulary of 25"),
        ({"save_hf": str(tmp_path / "full")}, {}, "full has mine, which this run"),
        ({"save_hf": str(source)}, {}, "in is what the run begins with"),
        ({"save_hf": str(begun("tied") / "in")}, {}, "tie_word_embeddings=True, the"),
        ({"save_hf": str(tmp_path / "tied")}, {}, r"tie_word_embeddings=True, the rec"),
        ({"save_hf": str(tmp_path / "half")}, {}, "half: .*config.json cannot be read"),
        ({"save_hf": str(tmp_path / "file")}, {}, "file cannot be written"),
        ({"save_hf": str(tmp_path / "file" / "a")}, {}, "a cannot be written"),
    ]
    for kept, changes, words in cases:
        made = recipe(folder, layout=Layout(data=2), **changes)
        made = changed(made, {"checkpoint": {"load_hf": str(source), **kept}})
        world(2).run(refuses, made, ValueError, words)
    assert (tmp_path / "full" / "mine").read_text() == ""


@pytest.mark.verifies(SAVE, f"{END}check_target", f"{END}put_in_place")
def test_an_earlier_runs_files_are_replaced_by_the_next(world, begun, tmp_path):
    """Also by other layouts, and with files that the run has copied."""
    source, out = tmp_path / "in", tmp_path / "out"
    with_extras(begun("llama"), source)
    made = changed(recipe(begun("llama")), {"checkpoint": {"load_hf": str(source)}})
    first = trained(world, dataclasses.replace(made, steps=1), out)
    names = sorted(path.name for path in out.rglob("*"))
    (out / "LICENSE").write_text("of the first")
    last = trained(world, dataclasses.replace(made, layout=Layout(tensor=2)), out)
    assert not all(map(torch.equal, first.values(), last.values()))
    assert sorted(path.name for path in out.rglob("*")) == names
    assert (out / "LICENSE").read_text() == EXTRAS["LICENSE"]


@pytest.mark.verifies(SAVE, f"{END}keep_added", f"{END}check_target")
def test_a_tokenizer_that_was_added_to_an_earlier_runs_files_stays(
    world, begun, tmp_path
):
    """Before the first run too. What is no part of a model is refused as before; a file
    of the run wins."""
    out, names = tmp_path / "out", ("tokenizer.json", "vocab.txt", "README.md")
    made = changed(recipe(begun("llama")), {"checkpoint": {"load_hf": None}})
    out.mkdir()
    for name in names:
        (out / name).write_text(f"my {name}")
    first = trained(world, dataclasses.replace(made, steps=1), out, load_hf=None)
    assert (out / names[0]).read_text() == f"my {names[0]}"
    (out / "README.md").chmod(0o600)
    with_extras(begun("llama"), tmp_path / "in")
    made = changed(made, {"layout": {"tensor": 2}})
    last = trained(world, made, out, load_hf=str(tmp_path / "in"))
    assert not all(map(torch.equal, first.values(), last.values()))
    assert "Whitespace" in (out / names[0]).read_text()
    assert [(out / name).read_text() for name in names[1:]] == [
        f"my {name}" for name in names[1:]
    ]
    assert (out / "README.md").stat().st_mode & 0o777 == 0o600
    for foreign in ("notes.json", "mine/tokenizer.json", "tokenizer.json.bak"):
        (out / foreign).parent.mkdir(exist_ok=True)
        (out / foreign).write_text("")
        kept = {"load_hf": str(tmp_path / "in"), "save_hf": str(out)}
        again = changed(made, {"checkpoint": kept})
        world(2).run(refuses, again, ValueError, f"out has {foreign}, which this run")
        (out / foreign).unlink()


@pytest.mark.verifies(f"{END}put_in_place", f"{END}exchange")
@pytest.mark.parametrize("known", [True, False], ids=["exchanged", "renamed"])
def test_a_folder_takes_the_place_of_another(tmp_path, monkeypatch, known):
    if not known:
        monkeypatch.setattr(to_hugging_face, "RENAME_EXCHANGE", 2**20)  # no such flag
    for name in ("new", "place"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    to_hugging_face.put_in_place(tmp_path / "new", tmp_path / "place")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert found == ["new/place", "place/new"] and len(list(tmp_path.iterdir())) == 2


def full_disk(made: Recipe) -> None:
    """The disk of rank 0 is full after the first of the tensors."""

    def write(path, about, tensors, metadata):
        next(tensors)
        raise OSError(28, "No space left on device")

    with replaced(hf_save, "write_safetensors", write):
        refuses(made, CheckpointError, "rank 0: .*No space left on device")
    dist.barrier()


@pytest.mark.verifies(SAVE, "xtrain.model.hf_save:_collect_and_write")
@pytest.mark.parametrize("layout", [Layout(data=2, zero=3), Layout(tensor=2)], ids=str)
def test_nothing_appears_when_it_cannot_be_written(world, begun, tmp_path, layout):
    folder = begun("llama")
    made = recipe(folder, layout=layout, steps=1)
    out = {"save_hf": str(tmp_path / "out")}
    world(2).run(full_disk, changed(made, {"checkpoint": out}))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_no_such_files_describe_is_refused_by_the_recipe():
    experts = load_recipe("tiny-experts")
    problem = problem_of(partial(changed, experts, {"checkpoint": {"save_hf": "x"}}))
    assert problem is not None and "moe_intermediate_size=120" in problem


def on(words: str) -> Recipe:
    base = load_recipe("bytes")
    return changed(base, nested(options_for(base, options_given(base, words.split()))))


@pytest.mark.verifies(f"{HERE}options_for", f"{HERE}differing")
def test_options_take_the_model_of_the_files(begun):
    files = begun("llama") / "in"
    load = f"--checkpoint.load_hf={files}"
    model = config_of(files)
    assert on(load).model == model and model.vocab_size == VOCABULARY
    assert on(f"{load} --layout.tensor=2").model.padded_vocab_size == 26
    free = on(f"{load} --model.seed=3 --model.hidden_size=16 --seed=4")
    assert free.model == dataclasses.replace(model, seed=3) and free.seed == 4
    rows = on(f"{load} --layout.tensor=2 --model.padded_vocab_size=32")
    assert rows.model.padded_vocab_size == 32
    for words, told in (
        ("--model.hidden_size=8", "--model.hidden_size=8 contradicts"),
        ("--model.num_hidden_layers=2", "which has 4"),
        ("--model.rope_scaling.factor=2", "--model.rope_scaling.factor=2.0 contra"),
        ("--model.rope_theta=10000", "which has 500.0"),
    ):
        with pytest.raises(ValueError, match=told):
            on(f"{load} {words}")
    with pytest.raises(ValueError, match=r"nowhere: .*config.json cannot be read"):
        on("--checkpoint.load_hf=nowhere")
    helped = " ".join(help_text(load_recipe("bytes")).split())
    assert "unless given that of checkpoint.load_hf, if it has one" in helped


@pytest.mark.verifies("xtrain.model.hf_files:write_safetensors")
def test_a_file_written_tensor_by_tensor_is_one_of_safetensors(tmp_path):
    path, generator = tmp_path / "a.safetensors", torch.Generator().manual_seed(0)
    tensors = {
        "wide": torch.randn(
            3, 5, generator=generator, device="cpu", dtype=torch.float64
        ),
        "fp32 ü": torch.randn(7, generator=generator, device="cpu"),
        "half": torch.randn(2, 2, 3, generator=generator, device="cpu").half(),
        "narrow": torch.randn(5, generator=generator, device="cpu").bfloat16(),
        "byte": torch.randn(3, generator=generator, device="cpu").to(
            torch.float8_e4m3fn
        ),
    }
    about = {name: About(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    before: list[weakref.ref] = []

    def one_after_the_other():
        for tensor in tensors.values():
            assert not any(ref() is not None for ref in before)
            made = tensor.clone()
            before.append(weakref.ref(made))
            yield made
            del made

    write_safetensors(path, about, one_after_the_other(), {"by": "us"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"by": "us"}
    save_file({"wide": tensors["wide"]}, tmp_path / "b", {"by": "us"})
    one = {"wide": about["wide"]}
    write_safetensors(path, one, iter([tensors["wide"]]), {"by": "us"})
    assert path.read_bytes() == (tmp_path / "b").read_bytes()
