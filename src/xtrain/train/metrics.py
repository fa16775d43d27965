"""What a run tells of each step: to the terminal, and to files on rank 0.

step 120/200  loss 2.314  norm 0.81  lr 1.2e-03  21,300 tokens/s  0:12 left

JSONL         a line a step, floats unrounded
TensorBoard   a scalar of each, by the package tensorboard
W&B           the same, by the package wandb

An error of writing is kept: the other ranks are in the next step already, and all of
them end with it when they compare flags, see `xtrain.train.stopping`.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from xtrain.comm.agreement import problem_of
from xtrain.plan.hardware import ACCELERATORS
from xtrain.train.recipe import Recipe

Numbers = dict[str, Any]


def peak_flops(device: torch.device) -> float | None:
    """Dense 16-bit FLOP/s of this device; None if it is not in the planner's table."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    for name, accelerator in ACCELERATORS.items():
        if all(part in words for part in name.split("-")):
            return accelerator.flops
    return None


def memory_used(device: torch.device) -> int:
    """The most bytes so far: allocated on a GPU, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(used * (1 if sys.platform == "darwin" else 1024))


class Meter:
    """Times steps: tokens a second, MFU, the share of waiting for data."""

    def __init__(self, recipe: Recipe, ranks: int, device: torch.device):
        self.tokens, self.device = recipe.tokens, device
        sequence = recipe.data.sequence
        each = recipe.model.flops_per_token(sequence, causal=True)
        peak = peak_flops(device)
        self.mfu_per_rate = None if peak is None else each / (peak * ranks)
        self.begun, self.waited = time.perf_counter(), 0.0

    def read(self, waited: float) -> Numbers:
        """Of the step since the last reading.

        Args:
            waited: seconds that the loader has made the run wait, in all.
        """
        now = time.perf_counter()
        seconds = max(now - self.begun, 1e-9)
        rate = self.tokens / seconds
        found = {
            "tokens_per_s": rate,
            "seconds": seconds,
            "data_wait": (waited - self.waited) / seconds,
            "memory": memory_used(self.device),
            "mfu": None if self.mfu_per_rate is None else rate * self.mfu_per_rate,
        }
        self.begun, self.waited = now, waited
        return found

    def pause(self) -> None:
        """What happened since the last reading is not training."""
        self.begun = time.perf_counter()


@contextmanager
def writable(option: str, path: object) -> Iterator[None]:
    """An OSError from inside names the option and its path."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"{option}={path} cannot be written: {why}") from None


class Writers:
    """Where numbers go; on other ranks than the first they go nowhere.

    Args:
        first: the step after which the run goes on: of a JSONL file that is there the
            lines up to it stay.

    Attributes: `problem`, what went wrong; from then on nothing is written.
    """

    problem: str | None = None

    def __init__(self, recipe: Recipe, is_first: bool, first: int):
        self.writers: list[tuple[str, Callable[[Numbers], None]]] = []
        self.ends: list[Callable[[], Any]] = []
        if not is_first:
            return
        log = recipe.log
        if log.jsonl is not None:
            with writable("log.jsonl", log.jsonl):
                self._jsonl(log.jsonl, first)
        if log.tensorboard is not None:
            with writable("log.tensorboard", log.tensorboard):
                self._tensorboard(log.tensorboard)
        if log.wandb is not None:
            self._wandb(log.wandb, recipe)

    def write(self, numbers: Numbers) -> None:
        """Of one step, or of an evaluation; "step" is among them."""
        for name, writer in self.writers:
            if self.problem is None and (why := problem_of(partial(writer, numbers))):
                self.problem = f"{name} was not written: {why}"

    def close(self) -> None:
        for end in self.ends:
            with suppress(OSError) if self.problem else nullcontext():
                end()

    def _jsonl(self, path: str, first: int) -> None:
        kept = []
        if first:
            try:
                with open(path, encoding="utf-8") as file:
                    lines = [(json.loads(line), line) for line in file if line.strip()]
                kept = [line for numbers, line in lines if numbers["step"] <= first]
            except (FileNotFoundError, ValueError, KeyError):
                kept = []  # another file, or none: it begins here
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        file.writelines(kept)
        file.flush()

        def write(numbers: Numbers) -> None:
            file.write(json.dumps(numbers) + "\n")
            file.flush()

        self.writers.append((f"log.jsonl={path}", write))
        self.ends.append(file.close)

    def _tensorboard(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "log.tensorboard is written by the package tensorboard: pip install "
                "tensorboard"
            ) from None
        writer = SummaryWriter(folder)

        def write(numbers: Numbers) -> None:
            for name, value in scalars(numbers).items():
                writer.add_scalar(name, value, numbers["step"])

        self.writers.append((f"log.tensorboard={folder}", write))
        self.ends.append(writer.close)

    def _wandb(self, project: str, recipe: Recipe) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise ValueError(
                "log.wandb is written by the package wandb: pip install wandb"
            ) from None
        from xtrain.train.saved import to_json

        run = wandb.init(project=project, config=json.loads(to_json(recipe)))
        told = lambda n: run.log(scalars(n), step=n["step"])  # noqa: E731
        self.writers.append((f"log.wandb={project}", told))
        self.ends.append(run.finish)


def scalars(numbers: Numbers) -> dict[str, float]:
    """The numbers without the step and without what is unknown; groups by "/"."""
    found: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            found |= {f"{name}/{key}": float(v) for key, v in value.items()}
        elif value is not None and name != "step":
            found[name] = float(value)
    return found


def line_of(numbers: Numbers, steps: int) -> str:
    """A step on the terminal."""
    step, rate = numbers["step"], numbers["tokens_per_s"]
    words = [
        f"step {step}/{steps}",
        f"loss {numbers['loss']:.3f}",
        f"norm {numbers['grad_norm']:.2f}",
        f"lr {numbers['lr']:.1e}",
        f"{rate:,.0f} tokens/s",
    ]
    if numbers["mfu"] is not None:
        words.append(f"MFU {numbers['mfu']:.1%}")
    words.append(f"{numbers['memory'] / 2**30:.1f} GiB")
    if numbers["data_wait"] >= 0.005:
        words.append(f"data {numbers['data_wait']:.0%}")
    left = round((steps - step) * numbers["seconds"])
    words.append(f"{left // 60}:{left % 60:02d} left")
    return "  ".join(words)


def printable(character: str) -> str:
    r"""Itself, or "\x1b" for the byte that begins a terminal's commands."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


class Terminal:
    """One line that is written over where it is a terminal, and one a step elsewhere.

    Args:
        every: where it is none, steps from one line to the next.

    Attributes: `problem`, as that of `Writers`.
    """

    problem: str | None = None

    def __init__(self, is_first: bool, every: int):
        self.on, self.every = is_first, every
        self.over, self.open = sys.stdout.isatty(), False

    def step(self, numbers: Numbers, steps: int) -> None:
        if not self.on:
            return
        if self.over:
            self._print(f"\r\x1b[2K{line_of(numbers, steps)}", end="")
            self.open = True
        elif numbers["step"] % self.every == 0 or numbers["step"] == steps:
            self._print(line_of(numbers, steps))

    def say(self, text: str) -> None:
        """Something besides steps; a model's text gives a terminal no commands."""
        if self.on:
            shown = "".join(c if c in "\n\t" else printable(c) for c in text)
            self._print(("\n" if self.open else "") + shown)
            self.open = False

    def _print(self, text: str, end: str = "\n") -> None:
        told = partial(print, text, end=end, flush=True)
        if self.problem is None and (why := problem_of(told)):
            self.problem = f"standard output was not written: {why}"

    def close(self) -> None:
        if self.open:
            self.say("")
