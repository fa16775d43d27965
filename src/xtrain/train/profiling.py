"""A trace of some steps, of each rank, for Perfetto or chrome://tracing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from xtrain.comm.agreement import problem_of
from xtrain.train.metrics import writable
from xtrain.train.recipe_parts import Log


class Profile:
    """Records the steps of `log.profile`, "first:last", and writes rank-R.json.

    Elsewhere it costs nothing.

    Attributes: `problem`, why this rank could not write them.

    Raises:
        OSError: the folder cannot be made.
    """

    problem: str | None = None

    def __init__(self, log: Log, device: torch.device, rank: int):
        self.window, self.folder = log.profile_window, Path(log.profile_folder)
        self.rank = rank
        if self.window is not None:
            with writable("log.profile_folder", self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
        self.kinds = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self.kinds.append(ProfilerActivity.CUDA)
        self.running: Any = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step, which counts from 1."""
        if self.window is None or not self.window[0] <= number <= self.window[1]:
            yield
            return
        if self.running is None:
            self.running = profile(activities=self.kinds)
            self.running.start()
        with record_function(f"step {number}"):
            yield
        if number == self.window[1] and (why := problem_of(self.close)):
            self.problem = f"log.profile_folder={self.folder} was not written: {why}"

    def close(self) -> None:
        """Write what is recorded; also of a run that ends within the window."""
        if self.running is None:
            return
        running, self.running = self.running, None
        running.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self.folder / f"rank-{self.rank}.json"))
