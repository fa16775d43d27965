"""`xtrain train`: a run from a recipe, on one process or on those of torchrun.

    xtrain train bytes --steps=300 --log.jsonl=run.jsonl
    torchrun --nproc-per-node 4 -m xtrain train bytes --layout.data=2 --layout.tensor=2

Options are the fields of the recipe, so `argparse` knows none of them.
"""

import argparse
import os
from pathlib import Path

WORDS = ("--print", "--help", "-h")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All words as they are: a recipe, and its options."""
    parser.add_argument("words", nargs="*", metavar="RECIPE --NAME=VALUE")


def run(arguments: argparse.Namespace) -> int:
    """Train, or print the configuration or all options of the recipe."""
    from xtrain.train.loading import load_recipe
    from xtrain.train.overrides import help_text, overridden
    from xtrain.train.saved import show

    words = list(arguments.words)
    asked = [word for word in words if word in WORDS]
    words = [word for word in words if word not in WORDS]
    name = words.pop(0) if words and not words[0].startswith("-") else "bytes"
    recipe = overridden(load_recipe(name), words)
    if asked and asked[0] != "--print":
        print(f"usage: xtrain train [RECIPE] [--NAME=VALUE ...] [--print]\n\n{ABOUT}")
        print(help_text(recipe), end="")
        return 0
    if asked:
        print(show(recipe), end="")
        return 0
    from xtrain.checkpoint import CheckpointError
    from xtrain.train.run import train

    try:
        result = train(recipe)
    except CheckpointError as error:
        raise ValueError(error) from None
    if os.environ.get("RANK", "0") == "0" and recipe.checkpoint.folder is not None:
        print(f"checkpoints: {Path(recipe.checkpoint.folder).resolve()}")
    return 0 if result.step >= recipe.steps else 1


ABOUT = """\
RECIPE is bytes (the default), tiny-experts, FILE.py, FILE.py:function, or
package.module:function, which return a Recipe. Options and the recipe's values:
"""
