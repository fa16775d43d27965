"""A whole training run, from a recipe: the same code for every layout.

    data -> batch -> accumulate -> clip_grad_norm -> optimizer.step -> log
                                                                    -> evaluate, save

A run that is resumed goes on with the step after its checkpoint: data, learning rate
and samples are functions of the step alone.
"""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.checkpoint import latest
from xtrain.checkpoint.background import BackgroundWriter
from xtrain.comm.agreement import raising_everywhere, values_of_all
from xtrain.train.batches import Batch, Batches
from xtrain.train.checkpoints import keep_newest, load, save
from xtrain.train.layouts import make_mesh, wrapped_model
from xtrain.train.metrics import Meter, Numbers, Terminal, Writers
from xtrain.train.optimizers import make_optimizer
from xtrain.train.processes import ranks
from xtrain.train.profiling import Profile
from xtrain.train.rates import rate_at
from xtrain.train.recipe import Recipe
from xtrain.train.sampling import can_write, generate
from xtrain.train.saved import to_json
from xtrain.train.sources import samples_of, tokenizer_of
from xtrain.train.steps import (
    accumulate,
    clip_grad_norm,
    evaluate,
    update_balance_biases,
)
from xtrain.train.traffic import bytes_by_axis
from xtrain.train.wrap import WrappedModel

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass
class TrainingResult:
    """What a run ends with, the same on every rank."""

    step: int
    losses: list[float]
    """Of the steps of this call."""
    norms: list[float]
    validation: float | None = None
    text: str | None = None


def train(recipe: Recipe) -> TrainingResult:
    """Train as a recipe says; every rank of the world calls it.

    Joins the ranks that torchrun has started, or runs in this process alone.

    Raises:
        ValueError: on every rank: the recipe does not fit the world, the data or the
            checkpoint.
    """
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    with ranks(recipe.device) as device:
        run = TrainingRun(recipe, device)
        try:
            result = run.go()
            run.finish()
            return result
        finally:
            run.close()


class TrainingRun:
    """This rank's part of a run."""

    def __init__(self, recipe: Recipe, device: torch.device):
        self.recipe, self.device = recipe, device
        self.is_first = dist.get_rank() == 0
        self.mesh = make_mesh(recipe.layout, device.type)
        with raising_everywhere(ValueError, OSError, group=None):
            self.samples = self._samples(evaluation=False)
            self.tokenizer = tokenizer_of(recipe.data)
            self.held_out = self._samples(True) if recipe.evaluate.every else None
        everywhere = values_of_all(self.samples.identity(), None)
        if any(other != everywhere[0] for other in everywhere):
            raise ValueError(f"ranks have different data: {everywhere}")
        self.model = self._model()
        self.optimizer = make_optimizer(self.model, recipe.optimizer)
        self.step = self._resumed()
        self.batches = self._batches(self.samples, self.step, recipe.data.workers)
        self.meter = Meter(recipe, dist.get_world_size(), device)
        self.terminal = Terminal(self.is_first, recipe.log.every)
        with raising_everywhere(ValueError, OSError, group=None):
            self.writers = Writers(recipe, self.is_first, self.step)
        self.bytes = bytes_by_axis(recipe, self.mesh)
        self.profile = Profile(recipe.log, device, dist.get_rank())
        self.result = TrainingResult(self.step, [], [])
        self.writer = BackgroundWriter() if recipe.checkpoint.background else None

    # -- the parts of a run

    def _samples(self, evaluation: bool) -> Any:
        vocabulary, seed = self.recipe.model.vocab_size, self.recipe.seed
        return samples_of(self.recipe.data, vocabulary, seed, evaluation)

    def _batches(self, samples: Any, start: int = 0, workers: int = 0) -> Batches:
        layout = self.recipe.layout
        group = self.data_group
        return Batches(
            samples, self.recipe.batch, group.rank(), group.size(), start, workers,
            layout.micro_batches,
        )  # fmt: skip

    @property
    def data_group(self) -> Any:
        """The ranks that bring other batches."""
        return self.model.data_group

    def _model(self) -> WrappedModel:
        recipe, layout = self.recipe, self.recipe.layout
        model = wrapped_model(
            recipe.config,
            layout,
            self.mesh,
            sequence=recipe.data.sequence,
            device=self.device,
            dtype=DTYPES.get(recipe.dtype, torch.float32),
        )
        if recipe.compile:
            model.compile_layers()
        return model

    def _resumed(self) -> int:
        """The step of the checkpoint that the run goes on from; 0 without one."""
        kept = self.recipe.checkpoint
        path: Path | str | None = kept.resume
        if path == "auto":
            path = None if kept.folder is None else latest(kept.folder)
        if path is None:
            return 0
        step, extra = load(path, self.model, self.optimizer)
        for name, mine in self.about().items():
            saved = (extra or {}).get(name, mine)
            if saved != mine:
                raise ValueError(
                    f"{path} was saved with {name}={saved}, and this run has {mine}: "
                    "the samples would not go on where they ended"
                )
        return step

    def about(self) -> dict[str, Any]:
        """What must not change when a run goes on, as JSON has it."""
        known = {"global_batch": self.recipe.batch, "data": self.samples.identity()}
        found: dict[str, Any] = json.loads(json.dumps(known))
        return found

    # -- the run

    def go(self) -> TrainingResult:
        """All steps that are left."""
        recipe = self.recipe
        with raising_everywhere(OSError, group=None):
            if self.is_first and recipe.checkpoint.folder is not None:
                folder = Path(recipe.checkpoint.folder)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "recipe.json").write_text(to_json(recipe), encoding="utf-8")
        self.meter.pause()
        while self.step < recipe.steps:
            with self.profile.step(self.step + 1):
                loss, norm = self.train_step(next(self.batches))
            self.step += 1
            self.result.losses.append(loss)
            self.result.norms.append(norm)
            self.log(loss, norm)
            self.after_step()
        self.result.step = self.step
        return self.result

    def train_step(self, batch: Batch) -> tuple[float, float]:
        """One update of the weights; the loss of all ranks, and the gradients' norm."""
        recipe = self.recipe
        factor = rate_at(self.step, recipe.rate, recipe.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.optimizer.lr * factor
        count = recipe.layout.micro_batches
        with self.computing():
            loss = accumulate(
                self.model, *self.on_device(batch), micro_batches=count,
                documents=self.documents(batch), first_row=self.batches.begin,
                dropout_seed=self.step * 2**32 + recipe.seed,
            )  # fmt: skip
        limit = float("inf") if recipe.max_norm is None else recipe.max_norm
        norm = clip_grad_norm(self.model, limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_balance_biases(self.model, recipe.optimizer.balance_rate)
        return loss.item(), norm.item()

    def computing(self) -> AbstractContextManager[Any]:
        """Autocast to bfloat16, if that is the dtype."""
        if self.recipe.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def on_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.tokens.to(self.device), batch.labels.to(self.device)

    def documents(self, batch: Batch) -> Tensor | None:
        given = batch.documents
        return None if given is None else given.to(self.device)

    # -- between steps

    def log(self, loss: float, norm: float) -> None:
        """Numbers of the last step, and of how long it took."""
        factor = rate_at(self.step - 1, self.recipe.rate, self.recipe.steps)
        numbers: Numbers = {
            "step": self.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": self.recipe.optimizer.lr * factor,
            **self.meter.read(self.batches.seconds_waited),
            "bytes": self.bytes,
        }
        self.writers.write(numbers)
        self.terminal.step(numbers, self.recipe.steps)

    def after_step(self) -> None:
        """Evaluate, write text, save: what is due after this step."""
        recipe, last = self.recipe, self.step == self.recipe.steps
        kept, sample = recipe.checkpoint, recipe.sample
        due = [
            (self.evaluate, recipe.evaluate.every, recipe.evaluate.every is not None),
            (self.write_text, sample.every, sample.prompt is not None),
            (self.save, kept.every, kept.folder is not None),
        ]
        for action, every, wanted in due:
            if wanted and (last or (every and self.step % every == 0)):
                action()
                self.meter.pause()

    def evaluate(self) -> None:
        """The loss on data that is not trained on; each batch weighs as its labels."""
        batches, total, count = self._batches(self.held_out), 0.0, 0.0
        self.model.eval()
        for number in range(self.recipe.evaluate.batches):
            batch = batches[number]
            with self.computing():
                loss = evaluate(
                    self.model, *self.on_device(batch), documents=self.documents(batch)
                )
            labels = (batch.labels != -100).sum().to(self.device, torch.float64)
            dist.all_reduce(labels, group=self.data_group)
            total, count = total + loss.item() * labels.item(), count + labels.item()
        self.model.train()
        found = total / max(count, 1)
        self.result.validation = found
        self.writers.write({"step": self.step, "validation_loss": found})
        self.terminal.say(f"step {self.step}: validation loss {found:.3f}")

    def write_text(self) -> None:
        """Text that goes on from the prompt."""
        sample = self.recipe.sample
        if not can_write(self.model):
            self.terminal.say("no text: pipeline and context ranks at once")
            return
        prompt = [int(i) for i in self.tokenizer.encode((sample.prompt or "").encode())]
        with self.computing():
            ids = generate(
                self.model, prompt or [self.tokenizer.end], sample.tokens,
                sequence=self.recipe.data.sequence, temperature=sample.temperature,
                seed=self.recipe.seed + self.step, end=self.tokenizer.end,
            )  # fmt: skip
        self.result.text = self.tokenizer.decode(ids)
        self.terminal.say(f"step {self.step}: {sample.prompt}{self.result.text}")

    def save(self) -> None:
        """A checkpoint of this step; older ones go, but for those that are kept."""
        kept = self.recipe.checkpoint
        what = str(kept.folder), self.step, self.model, self.optimizer, self.about()
        if self.writer is None:
            save(*what)
        else:
            save(*what, write=self.writer)
        if kept.keep is not None and self.is_first:  # the one under way comes besides
            keep_newest(str(kept.folder), kept.keep)

    def finish(self) -> None:
        """Wait for the last checkpoint; CheckpointError if it could not be written."""
        if self.writer is None:
            return
        self.writer.close()
        kept = self.recipe.checkpoint
        if kept.keep is not None and self.is_first:
            keep_newest(str(kept.folder), kept.keep)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.end()
        self.batches.close()
        self.profile.close()
        self.writers.close()
        self.terminal.close()
