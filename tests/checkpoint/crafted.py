"""Change the index of a checkpoint, as one who knows its format could."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xtrain.checkpoint.index import checksum_of

Change = Callable[[dict[str, Any]], Any]


def change_index(checkpoint: Path, change: Change) -> None:
    """Write a changed index, whose checksum is right."""
    path = checkpoint / "index.json"
    index = json.loads(path.read_text())
    change(index)
    index["checksum"] = checksum_of(index)
    path.write_text(json.dumps(index))


def update(*keys: str, **values: Any) -> Change:
    """Set entries of the index, or of what lies in it under `keys`."""

    def change(index: dict[str, Any]) -> None:
        for key in keys:
            index = index[key]
        index.update(values)

    return change


def drop(*keys: Any) -> Change:
    """Remove the last of `keys` from what lies under the others."""

    def change(index: Any) -> None:
        for key in keys[:-1]:
            index = index[key]
        del index[keys[-1]]

    return change


def pieces(name: str, edit: Callable[[list[Any]], Any]) -> Change:
    """Edit the list of a tensor's pieces [offset, size, file, checksum]."""
    return lambda index: edit(index["tensors"][name]["pieces"])
