"""`xtrain train`: in this process, and on ranks that torchrun has started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from xtrain.cli import main

RECIPE = """
from xtrain.model import XtrainConfig
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Data


def small():
    model = XtrainConfig(
        vocab_size=257, padded_vocab_size=264, hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    )
    data = Data(path=DATA, sequence=24)
    return Recipe(steps=3, model=model, data=data, global_batch=4, dtype="float64")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 40)
    file = tmp_path / "recipes.py"
    file.write_text(RECIPE.replace("DATA", repr(str(text))))
    return str(file)


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def on_two(words: list[str]) -> None:
    """`xtrain train` on two ranks of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "xtrain", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=300)


@pytest.mark.verifies("xtrain.cli.train:run")
def test_it_trains_and_torchrun_gives_the_same_losses(recipe, tmp_path, capsys):
    alone, several = tmp_path / "alone.jsonl", tmp_path / "several.jsonl"
    assert main(["train", recipe, f"--log.jsonl={alone}", "--device=cpu"]) == 0
    assert "step 3/3  loss " in capsys.readouterr().out
    on_two([
        recipe, "--layout.data=2", "--layout.zero=3", f"--log.jsonl={several}",
        "--device=cpu",
    ])  # fmt: skip
    assert losses(several) == pytest.approx(losses(alone), rel=1e-9, abs=0)


@pytest.mark.verifies("xtrain.cli.train:run")
def test_it_begins_with_files_of_hugging_face_and_ends_in_some(
    recipe, tmp_path, capsys
):
    """Two ranks of torchrun go on from what one process has written."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["train", recipe, "--device=cpu", f"--checkpoint.save_hf={first}"]
    assert main(words) == 0
    assert f"files of Hugging Face: {first}" in capsys.readouterr().out
    load = ["--checkpoint.load_hf", str(first), "--checkpoint.save_hf", str(second)]
    alone = tmp_path / "alone.jsonl"
    words = ["train", "bytes", *load[:2], "--steps=2", f"--log.jsonl={alone}"]
    data = ["--dtype=float64", f"--data.path={tmp_path / 'text.txt'}", "--device=cpu"]
    assert main([*words, *data]) == 0
    several = tmp_path / "several.jsonl"
    on_two([
        "bytes", *load, "--steps=2", "--layout.tensor=2", f"--log.jsonl={several}",
        *data,
    ])  # fmt: skip
    assert losses(several) == pytest.approx(losses(alone), rel=1e-9, abs=0)
    sizes = [load_file(p / "model.safetensors") for p in (first, second)]
    assert {n: t.shape for n, t in sizes[0].items()} == {
        n: t.shape for n, t in sizes[1].items()
    }
    assert main(["train", "bytes", *load, "--model.hidden_size=32"]) == 2
    told = capsys.readouterr().err
    assert f"--model.hidden_size=32 contradicts {first}" in told and "has 16" in told


@pytest.mark.verifies("xtrain.cli.train:run")
def test_print_and_help_show_every_option_and_train_nothing(recipe, capsys):
    assert main(["train", recipe, "--steps=7", "--print"]) == 0
    shown = capsys.readouterr().out
    assert "steps = 7\n" in shown and "data.sequence = 24\n" in shown
    assert main(["train", recipe, "--help"]) == 0
    helped = capsys.readouterr().out
    assert "usage: xtrain train" in helped and "--layout.tensor=1\n" in helped


@pytest.mark.verifies("xtrain.cli.train:run")
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--layout.tensr=2", "did you mean --layout.tensor?"),
        ("--layout.data=2", "2 ranks, but there are 1"),
        ("--steps=many", "steps"),
        ("--checkpoint.resume=nothing", "nothing"),
        ("--data.path=gone", "data.path=gone is not a file"),
        ("--checkpoint.folder=/dev/null", "folder=/dev/null cannot be written: File"),
        ("--threads=1e9", "threads=1000000000 is above 1024"),
        ("--data.workers=1e6", "data: workers=1000000 is above 1024"),
        ("--global_batch=1e15", "tokens of a micro-batch=24000000000000000 is above"),
        ("--layout.tensor=4 --model.padded_vocab_size=266", "tensor=4: give 268, or"),
        ("--log.jsonl=/dev/null/a", "log.jsonl=/dev/null/a cannot be written: Not a"),
        ("--ranks 8", "--ranks is an option of --dry-run"),
        ("--steps=2 --topology=dgx_h100", "--topology is an option of --dry-run"),
        ("--dry-run --ranks=x", "argument --ranks: invalid int value: 'x'"),
    ],
)
def test_a_mistake_is_one_line(recipe, capsys, word, told):
    try:
        code = main(["train", recipe, "--device=cpu", *word.split()])
    except SystemExit as end:  # of argparse
        code = end.code
    words = capsys.readouterr().err
    assert code == 2 and told in words and words.count("\n") == 1


@pytest.mark.verifies("xtrain.cli.train:run")
def test_a_run_that_has_ended_has_nothing_to_train(recipe, tmp_path, capsys):
    words = ["train", recipe, "--device=cpu", f"--checkpoint.folder={tmp_path / 'a'}"]
    assert main(words) == 0 and main([*words, "--steps=2"]) == 0
    assert "nothing to train: step 3 of 2 is saved" in capsys.readouterr().out
    assert main([*words, "--data.sequence=12"]) == 2
    told = "saved with sequence_length=24, and this run has 12"
    assert told in capsys.readouterr().err
