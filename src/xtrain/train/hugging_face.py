"""Runs that begin with the files of a Hugging Face model.

    DIR/config.json        -> the model of the recipe
    DIR/*.safetensors      -> the shards of every rank, in any layout
    DIR/tokenizer.json     -> the tokenizer of text

Each rank reads the elements of its own shards alone (`model.hf_load.fill`).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from xtrain.checkpoint import CheckpointError
from xtrain.model.config import LOSSES, XtrainConfig
from xtrain.model.hf_config import config_from_hf
from xtrain.model.hf_files import CONFIG, read_json
from xtrain.model.hf_load import Found, look
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Data
from xtrain.train.sources import is_text
from xtrain.train.to_hugging_face import check_target

TOKENIZER = "tokenizer.json"
FREE = (
    "seed",
    "padded_vocab_size",
    "attention_dropout",
    "router_aux_loss_pooled",
    *LOSSES,
)
"""Fields of a config that may differ from `config.json`: weights fit all the same."""


def config_of(directory: str | Path) -> XtrainConfig:
    """The model that DIR's `config.json` describes, for a recipe of one's own.

    Raises:
        ValueError: there is no such file, or it is of a model that is not supported.
    """
    with as_value_error(f"{directory}: "):
        values = read_json(Path(directory) / CONFIG)
        return config_from_hf(values)


def options_for(recipe: Recipe, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a command line, `model` among them if the run begins with files.

    Args:
        given: values by dotted name.

    Raises:
        ValueError: an option contradicts the files, by name; or as `config_of`.
    """
    name = "checkpoint.load_hf"
    directory = given.get(name, recipe.checkpoint.load_hf)
    if directory is None:
        return given
    files = config_of(directory)
    model = files if differing(recipe.model, files) else recipe.model
    prefix, rest = "model.", dict(given)
    own = {n.removeprefix(prefix): rest.pop(n) for n in given if n.startswith(prefix)}
    for field, value in own.items():
        there: Any = files
        for part in field.split("."):
            there = getattr(there, part, None)
        if field not in FREE and value != there:
            raise ValueError(
                f"--model.{field}={value} contradicts {Path(directory, CONFIG)}, which "
                f"has {there}"
            )
    changes = {field: value for field, value in own.items() if field in FREE}
    return rest | {"model": dataclasses.replace(model, **changes)}


def differing(model: XtrainConfig, files: XtrainConfig) -> list[str]:
    """The fields in which the files' weights would be of another model."""
    names = [field.name for field in dataclasses.fields(model)]
    return [
        name
        for name in names
        if name not in FREE and getattr(model, name) != getattr(files, name)
    ]


def data_of(recipe: Recipe) -> Data:
    """The recipe's data; text has the tokenizer of the files unless one is given.

    So has a prompt, where the data are tokens already.
    """
    data, directory = recipe.data, recipe.checkpoint.load_hf
    if data.tokenizer is not None or data.path is None or directory is None:
        return data
    path = Path(directory) / TOKENIZER
    named = [name for name in (data.path, data.validation) if name is not None]
    text = any(Path(name).is_file() and is_text(name) for name in named)
    if path.is_file() and (text or recipe.sample.prompt is not None):
        return dataclasses.replace(data, tokenizer=str(path))
    return data


def found_for(recipe: Recipe) -> Found | None:
    """What the recipe's `load_hf` has; None if it has none.

    ValueError, on this rank alone, if it is not the recipe's model, or `save_hf` cannot
    be written.
    """
    kept, found = recipe.checkpoint, None
    if kept.load_hf is not None:
        with as_value_error(f"checkpoint.load_hf={kept.load_hf}: "):
            found = look(kept.load_hf)
            check_same(recipe.model, found.config)
    out = kept.save_hf if dist.get_rank() == 0 else None
    if out is not None and check_target(out, found):
        with as_value_error(f"checkpoint.save_hf={out}: "):
            check_same(recipe.model, config_of(out))
    return found


def check_same(model: XtrainConfig, files: XtrainConfig) -> None:
    """ValueError if the files' weights are of another model."""
    for name in differing(model, files):
        mine, theirs = (getattr(c, name) for c in (model, files))
        raise ValueError(f"{CONFIG} has {name}={theirs!r}, the recipe {mine!r}")


@contextmanager
def as_value_error(what: str) -> Iterator[None]:
    """An error of files inside becomes a ValueError that begins with `what`."""
    try:
        yield
    except (CheckpointError, ValueError) as error:
        raise ValueError(f"{what}{error}") from error
