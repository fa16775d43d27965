"""A whole training run, from a recipe: the same code for every layout.

    data -> batch -> accumulate -> clip_grad_norm -> optimizer.step -> log
                                                                    -> evaluate, save

It begins with weights of the config's seed or of a Hugging Face model. A run that is
resumed goes on with the step after its checkpoint: data, learning rate and samples are
functions of the step alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from xtrain.checkpoint import CheckpointError
from xtrain.comm.agreement import (
    raising_everywhere,
    values_of_all,
)
from xtrain.comm.flight_recorder import FlightRecorder
from xtrain.model.hf_load import fill
from xtrain.train.batches import Batch, Batches
from xtrain.train.elastic import fitted
from xtrain.train.hugging_face import data_of, found_for
from xtrain.train.layouts import make_mesh, wrapped_model, wrapper_of
from xtrain.train.metrics import Meter, Numbers, Terminal, Writers, writable
from xtrain.train.nonfinite import NonFiniteGuard
from xtrain.train.optimizers import make_optimizer
from xtrain.train.phases import Place
from xtrain.train.processes import ranks
from xtrain.train.profiling import Profile
from xtrain.train.rates import rate_at
from xtrain.train.recipe import Recipe
from xtrain.train.sampling import generate
from xtrain.train.saving import Saving
from xtrain.train.sources import samples_of, tokenizer_of
from xtrain.train.starting import Starting
from xtrain.train.steps import evaluate, train_step
from xtrain.train.stopping import Stopping
from xtrain.train.stragglers import Stragglers, slow_ranks
from xtrain.train.to_hugging_face import weights_of
from xtrain.train.traffic import bytes_by_axis
from xtrain.train.wrap import WrappedModel

STUCK = 60.0  # seconds of a call, from which on the flight recorder reports it
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
    stopped: bool = False
    """SIGTERM came, and the last step is saved."""


def train(recipe: Recipe) -> TrainingResult:
    """Train as a recipe says; every rank of the world calls it.

    Joins the ranks that torchrun has started, or runs in this process alone.
    Any error carries a note of its place, see `xtrain.train.phases`.

    Raises:
        ValueError: on every rank: the recipe does not fit the world, the data or the
            checkpoint.
    """
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    place, kept = Place(), recipe.checkpoint
    stopping = Stopping(kept.folder is not None, kept.grace, place)
    with (
        place.named(),
        Starting(place, recipe.timeout),
        ranks(recipe.device, recipe.timeout) as device,
        recording(recipe.log.flight_recorder, recipe.timeout),
        stopping,
    ):
        run = TrainingRun(recipe, device, stopping)
        try:
            result = run.go()
            run.finish()
            return result
        finally:
            run.close()


@contextmanager
def recording(folder: str | None, timeout: float | None = None) -> Iterator[None]:
    """The last calls of each rank go to `folder` when the run hangs or fails."""
    with ExitStack() as stack:
        if folder is not None:
            stuck = STUCK if timeout is None else min(STUCK, timeout / 2)
            with (
                raising_everywhere(OSError, group=None),
                writable("log.flight_recorder", folder),
            ):
                stack.enter_context(FlightRecorder(folder, stuck_after=stuck))
        yield


class TrainingRun:
    """This rank's part of a run."""

    def __init__(
        self, recipe: Recipe, device: torch.device, stopping: Stopping | None = None
    ):
        recipe = fitted(recipe, dist.get_world_size())
        self.recipe, self.device = recipe, device
        self.stopping = stopping or Stopping(wanted=False)
        self.place = self.stopping.place
        self.is_first = dist.get_rank() == 0
        self.mesh = make_mesh(recipe.layout, device.type)
        with raising_everywhere(ValueError, OSError, group=None):
            self.found = found_for(recipe)
            self.data = data_of(recipe)
            self.tokenizer = tokenizer_of(self.data, recipe.model.vocab_size)
            self.samples = self._samples(evaluation=False)
            self.held_out = self._samples(True) if recipe.evaluate.every else None
        everywhere = values_of_all(self.samples.identity(), None)
        if any(other != everywhere[0] for other in everywhere):
            raise ValueError(f"ranks have different data: {everywhere}")
        self.saving = Saving(recipe, self.samples.identity(), self.found)
        path = self.saving.resumed_from()
        self.model = self._model()
        if path is None and self.found is not None:
            with raising_everywhere(CheckpointError, group=None):
                fill(weights_of(self.model), self.found)
        self.optimizer = make_optimizer(self.model, recipe.optimizer)
        allowed = recipe.optimizer.skip_nonfinite
        self.guard = NonFiniteGuard(self.model, self.mesh, self.optimizer, allowed)
        self.step = 0
        if path is not None:
            self.step = self.saving.resume(path, self.model, self.optimizer)
        self.batches = self._batches(self.samples, self.step, recipe.data.workers)
        self.meter = Meter(recipe, dist.get_world_size(), device)
        self.terminal = Terminal(self.is_first, recipe.log.every)
        with raising_everywhere(ValueError, OSError, group=None):
            self.writers = Writers(recipe, self.is_first, self.step)
            self.profile = Profile(recipe.log, device, dist.get_rank())
        self.bytes = bytes_by_axis(recipe, self.mesh)
        self.result = TrainingResult(self.step, [], [])
        self.stragglers = Stragglers(recipe.log.stragglers, self.mesh, device)

    # -- the parts of a run

    def _samples(self, evaluation: bool) -> Any:
        vocabulary, seed = self.recipe.model.vocab_size, self.recipe.seed
        return samples_of(self.data, vocabulary, seed, evaluation)

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
        sharded = wrapper_of(layout) in ("fsdp", "hsdp")
        model = wrapped_model(
            recipe.config,
            layout,
            self.mesh,
            sequence=recipe.data.sequence,
            device="meta" if sharded and self.found else self.device,
            dtype=DTYPES.get(recipe.dtype, torch.float32),
        )
        if recipe.compile:
            model.compile_layers()
        return model

    # -- the run

    def go(self) -> TrainingResult:
        """All steps that are left."""
        recipe = self.recipe
        self.saving.start()
        self.meter.pause()
        while self.step < recipe.steps:
            self.place.enter("data", self.step + 1)
            with self.profile.step(self.step + 1), self.stragglers.step():
                loss, norm = self.train_step(next(self.batches))
            self.step += 1
            self.result.losses.append(loss)
            self.result.norms.append(norm)
            self.place.enter("log")
            self.log(loss, norm)
            more = self.step < recipe.steps
            self.result.stopped = more and self.stopping.everywhere(self.not_told())
            self.stopping.agreed |= not more
            self.after_step()
            if self.result.stopped:
                self.terminal.say(f"step {self.step}: SIGTERM, saved")
                break
        self.result.step = self.step
        return self.result

    def train_step(self, batch: Batch) -> tuple[float, float]:
        """One update of the weights; the loss of all ranks, and the gradients' norm."""
        return train_step(
            self.model, self.optimizer, batch.to(self.device), self.recipe, self.step,
            computing=self.computing, leaves_out=self.leaves_out, place=self.place,
        )  # fmt: skip

    def leaves_out(self, loss: float, norm: float, again: Callable[[], object]) -> bool:
        """Whether the weights stay as they are; the terminal is told why."""
        why = self.guard.leaves_out(self.step + 1, loss, norm, again)
        if why:
            self.terminal.say(why)
        return bool(why)

    def computing(self) -> AbstractContextManager[Any]:
        """Autocast to bfloat16, if that is the dtype."""
        if self.recipe.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

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
        for slow in slow_ranks(self.stragglers.compared(self.batches.seconds_waited)):
            self.writers.write({"step": self.step, "slow": slow.numbers})
            self.terminal.say(f"step {self.step}: {slow.text}")

    def after_step(self) -> None:
        """Evaluate, write text, save: what is due after this step."""
        recipe, last = self.recipe, self.step == self.recipe.steps
        kept, sample = recipe.checkpoint, recipe.sample
        due = [
            ("evaluate", self.evaluate, recipe.evaluate.every,
             recipe.evaluate.every is not None),
            ("sample", self.write_text, sample.every, sample.prompt is not None),
            ("checkpoint", self.save, kept.every, kept.folder is not None),
        ]  # fmt: skip
        for phase, action, every, wanted in due:
            now = last or (every and self.step % every == 0)
            if self.result.stopped:  # soon killed
                now = action == self.save
            if wanted and now:
                self.place.enter(phase)
                action()
                self.meter.pause()

    def evaluate(self) -> None:
        """The loss on data that is not trained on; each batch weighs as its labels."""
        batches, total, count = self._batches(self.held_out), 0.0, 0.0
        self.model.eval()
        for number in range(self.recipe.evaluate.batches):
            batch = batches[number].to(self.device)
            given = batch.tokens, batch.labels
            with self.computing():
                loss = evaluate(self.model, *given, documents=batch.documents)
            labels = (batch.labels != -100).sum().double()
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
        """A checkpoint of this step."""
        self.saving.save(self.step, self.model, self.optimizer)

    def finish(self) -> None:
        """Wait for the last checkpoint, and write files of Hugging Face.

        On every rank, if some could not be written: CheckpointError; OSError of a log.
        """
        self.place.enter("finish")
        self.saving.finish(self.model, self.result.stopped)
        self.stopping.everywhere(self.not_told())

    def not_told(self) -> str | None:
        """Why this rank could not write what it has to tell."""
        tellers = self.writers, self.terminal, self.profile
        return next((each.problem for each in tellers if each.problem), None)

    def close(self) -> None:
        self.saving.close()
        self.batches.close()
        self.stragglers.close()
        self.profile.close()
        self.writers.close()
        self.terminal.close()
