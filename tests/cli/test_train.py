"""`xtrain train`: in this process, and on ranks that torchrun has started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.verifies("xtrain.cli.train:run")
def test_it_trains_and_torchrun_gives_the_same_losses(recipe, tmp_path, capsys):
    alone, several = tmp_path / "alone.jsonl", tmp_path / "several.jsonl"
    assert main(["train", recipe, f"--log.jsonl={alone}", "--device=cpu"]) == 0
    assert "step 3/3  loss " in capsys.readouterr().out
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "-m", "xtrain", "train", recipe, "--layout.data=2", "--layout.zero=3",
        f"--log.jsonl={several}", "--device=cpu",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=300)
    assert losses(several) == pytest.approx(losses(alone), rel=1e-9, abs=0)


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
    ],
)
def test_a_mistake_is_one_line(recipe, capsys, word, told):
    assert main(["train", recipe, word, "--device=cpu"]) == 2
    assert told in capsys.readouterr().err
