"""What a run saves and goes on from: checkpoints, and files of Hugging Face at its end.

A run that is resumed goes on with the step after its checkpoint. It must have the same
data and global batch: samples are functions of the step.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xtrain.checkpoint import CheckpointError, latest
from xtrain.checkpoint.background import BackgroundWriter
from xtrain.comm.agreement import raising_everywhere, value_of_rank_0
from xtrain.train.checkpoints import keep_newest, load, save
from xtrain.train.metrics import writable
from xtrain.train.recipe import Recipe
from xtrain.train.saved import to_json
from xtrain.train.to_hugging_face import save_hf
from xtrain.train.wrap import WrappedModel


class Saving:
    """The checkpoints of a run, and its files of Hugging Face.

    Args:
        data: identifies the data, as JSON has it.
        found: the files of Hugging Face that the run began with.
    """

    def __init__(self, recipe: Recipe, data: Any, found: Any):
        self.recipe, self.kept, self.found = recipe, recipe.checkpoint, found
        known = {"global_batch": recipe.batch, "data": data}
        self.about: dict[str, Any] = json.loads(json.dumps(known))
        self.writer: BackgroundWriter | None = None
        self.step = 0  # of the last checkpoint

    def resumed_from(self) -> Path | str | None:
        """The checkpoint that the run goes on from, as rank 0 finds it."""
        path: Path | str | None = self.kept.resume
        if path == "auto":
            with raising_everywhere(CheckpointError, group=None):
                folder = self.kept.folder
                path = None if folder is None else latest(folder)
            path = value_of_rank_0(path, None)
        return path

    def resume(self, path: Path | str, model: WrappedModel, optimizer: Any) -> int:
        """Read a checkpoint; its step. The optimizer's options stay the recipe's.

        ValueError on every rank if it was saved with other data or another batch.
        """
        groups = optimizer.param_groups
        options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        step, extra = load(path, model, optimizer)
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)
        here, there = (flat(about) for about in (self.about, extra or {}))
        for name in here:
            if name in there and there[name] != here[name]:
                raise ValueError(
                    f"{path} was saved with {name}={there[name]}, and this run has "
                    f"{here[name]}: the samples would not go on where they ended"
                )
        return step

    def start(self) -> None:
        """Write the recipe, and start what writes in the background if it is wanted."""
        with raising_everywhere(OSError, group=None):
            if self.kept.folder is not None and dist.get_rank() == 0:
                folder, text = Path(self.kept.folder), to_json(self.recipe)
                with writable("checkpoint.folder", folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / "recipe.json").write_text(text, encoding="utf-8")
        if self.kept.background:
            self.writer = BackgroundWriter()

    def save(self, step: int, model: WrappedModel, optimizer: Any) -> None:
        """A checkpoint of this step; older ones go, but for those that are kept."""
        more = {} if self.writer is None else {"write": self.writer}
        save(str(self.kept.folder), step, model, optimizer, self.about, **more)
        self.step = step
        self._keep_newest()  # the one under way comes besides

    def _keep_newest(self) -> None:
        if self.kept.keep is not None and dist.get_rank() == 0:
            keep_newest(str(self.kept.folder), self.kept.keep, self.step)

    def finish(self, model: WrappedModel, stopped: bool) -> None:
        """Wait for the last checkpoint, and write files of Hugging Face.

        CheckpointError on every rank if some could not be written.
        """
        if self.writer is not None:
            self.writer.close()
            self._keep_newest()
        if self.kept.save_hf is not None and not stopped:
            dtype = getattr(torch, self.recipe.dtype)
            save_hf(self.kept.save_hf, model, self.found, dtype)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.end()


def flat(about: dict[str, Any]) -> dict[str, Any]:
    """What identifies a run, value by value: those of the data among the others."""
    data = about.get("data")
    rest = {name: value for name, value in about.items() if name != "data"}
    return rest | data if isinstance(data, dict) else about
