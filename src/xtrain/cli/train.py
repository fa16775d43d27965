"""`xtrain train`: a run from a recipe, on one process or on those of torchrun.

    xtrain train bytes --steps=300 --log.jsonl=run.jsonl
    torchrun --nproc-per-node 4 -m xtrain train bytes --layout.data=2 --layout.tensor=2
    xtrain train bytes --checkpoint.load_hf=llama --checkpoint.save_hf=tuned
    xtrain train llama.py --dry-run --ranks 1024 --topology dgx_h100

Options are the fields of the recipe, so `argparse` knows none of them.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from xtrain.cli import Parser

WORDS = ("--print", "--help", "-h")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All words as they are: a recipe, and its options."""
    parser.add_argument("words", nargs="*", metavar="RECIPE --NAME=VALUE")


def run(arguments: argparse.Namespace) -> int:
    """Train, or print the configuration or all options of the recipe."""
    from xtrain.train.changes import changed
    from xtrain.train.hugging_face import options_for
    from xtrain.train.loading import load_recipe
    from xtrain.train.overrides import help_text, nested, options_given
    from xtrain.train.saved import show

    dry, words = dry_options(arguments.words)
    asked = [word for word in words if word in WORDS]
    words = [word for word in words if word not in WORDS]
    name = words.pop(0) if words and not words[0].startswith("-") else "bytes"
    recipe = load_recipe(name)
    given = options_for(recipe, options_given(recipe, words))
    recipe = changed(recipe, nested(given))
    check_rows(options_given(recipe, words), recipe.layout.tensor)
    if asked and asked[0] != "--print":
        print(f"usage: xtrain train [RECIPE] [--NAME=VALUE ...] [--print]\n\n{ABOUT}")
        print(help_text(recipe), end="")
        return 0
    if asked:
        print(show(recipe), end="")
        return 0
    if dry is not None:
        return show_dry_run(recipe, dry)
    from xtrain.checkpoint import CheckpointError
    from xtrain.train.run import train
    from xtrain.train.stopping import STATUS

    try:
        result = train(recipe)
    except CheckpointError as error:
        raise ValueError(error) from None
    kept = recipe.checkpoint
    if os.environ.get("RANK", "0") == "0":
        if not result.losses and result.step >= recipe.steps:
            print(f"nothing to train: step {result.step} of {recipe.steps} is saved")
        if kept.folder is not None:
            print(f"checkpoints: {Path(kept.folder).resolve()}")
        if kept.save_hf is not None:
            print(f"files of Hugging Face: {Path(kept.save_hf).resolve()}")
    return STATUS if result.stopped else 0


def check_rows(given: dict[str, Any], ranks: int) -> None:
    """ValueError for rows of the vocabulary that tensor ranks cannot share."""
    rows = given.get("model.padded_vocab_size")
    if rows and rows % ranks:
        raise ValueError(
            f"--model.padded_vocab_size={rows} is not divisible by layout.tensor="
            f"{ranks}: give {-(-rows // ranks) * ranks}, or leave it out"
        )


def dry_options(words: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """What `--dry-run` takes, None without it, and the other words.

    ValueError for one of its options without it.
    """
    parser = Parser(prog="xtrain train", add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--topology", default="dgx_h100")
    parser.add_argument("--gpu")
    parser.add_argument("--every-rank", action="store_true")
    found, rest = parser.parse_known_args(words)
    if found.dry_run:
        return found, rest
    for word in words:
        if word.startswith("--") and word != "--" and word not in rest:
            raise ValueError(f"{word.partition('=')[0]} is an option of --dry-run")
    return None, list(words)


def show_dry_run(recipe: Any, options: argparse.Namespace) -> int:
    """Print the table; 1 if the step does not fit or does not end."""
    from xtrain.train.dry_run import Hangs, dry_run

    ranks = recipe.layout.gpus if options.ranks is None else options.ranks
    try:
        found = dry_run(
            recipe, ranks, options.topology, options.gpu, options.every_rank
        )
    except Hangs as hang:
        print(f"hangs: {hang}")
        return 1
    print(found, end="")
    return 0 if found.peak <= found.accelerator.memory else 1


ABOUT = """\
RECIPE is bytes (the default), tiny-experts, FILE.py, FILE.py:function, or
package.module:function, which return a Recipe.

--dry-run prints what a step would cost and whether it fits, on virtual ranks, without
data; with it: --ranks N, --topology NAME (dgx_h100), --gpu NAME (the topology's),
--every-rank (execute all, not one of each class).

Options and the recipe's values:
"""
