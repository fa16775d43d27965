"""Find a recipe by what the command line calls it.

bytes                       one that comes along
FILE.py:function            of a file
FILE.py                     its only public function
package.module:function     of a module that Python can import
FILE.json                   as a run has saved it
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from xtrain.train.recipe import Recipe
from xtrain.train.recipes import BUILT_IN
from xtrain.train.saved import from_json


def load_recipe(name: str = "bytes") -> Recipe:
    """The recipe of that name, with the values of its author.

    Raises:
        ValueError: there is no such file, module or function, it raises, or it returns
            something else.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name.endswith(".json"):
        return _saved(name)
    place, _, function = name.rpartition(":")
    if name.endswith(".py"):
        place, function = name, ""
    if not place:
        near = get_close_matches(name, BUILT_IN, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"no recipe {name!r}: {hint}There are {', '.join(BUILT_IN)}; or give "
            "FILE.py:function or package.module:function"
        )
    module = _module(place, name)
    return _called(_function(module, function, place), name)


def _saved(name: str) -> Recipe:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"recipe {name}: there is no such file")
    try:
        return from_json(path.read_text(encoding="utf-8"), Recipe)
    except ValueError as error:
        raise ValueError(f"recipe {name}: {error}") from error


def _module(place: str, name: str) -> ModuleType:
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"recipe {name}: there is no file {place}")
    try:
        if place.endswith(".py"):
            return _run_file(Path(place).resolve())
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"recipe {name}: {_words(error)}") from error


def _run_file(path: Path) -> ModuleType:
    """The file as a module of a name of its own."""
    digest = sha256(bytes(path)).hexdigest()[:8]
    spec = spec_from_file_location(f"xtrain_recipe_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str, place: str) -> Callable[[], Any]:
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not key.startswith("_")
    }
    listed = ", ".join(own) or "none"
    if name:
        found = getattr(module, name, None)
        if not callable(found):
            raise ValueError(
                f"{place} has no function {name!r}; its public functions: {listed}"
            )
        return found  # type: ignore[no-any-return]
    if len(own) != 1:
        raise ValueError(
            f"{place} has not one public function but {len(own)} ({listed}): give "
            f"{place}:function"
        )
    return next(iter(own.values()))


def _called(function: Callable[[], Any], name: str) -> Recipe:
    try:
        recipe = function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"recipe {name} raises {_words(error)}") from error
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe {name} returns {type(recipe).__name__}, not a Recipe")
    return recipe


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
