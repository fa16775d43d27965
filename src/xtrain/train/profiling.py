"""A trace of some steps, of each rank, for Perfetto or chrome://tracing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from xtrain.comm.agreement import problem_of
from xtrain.train.recipe_parts import Log


class Profile:
    """Records the steps of `log.profile`, "first:last", and writes rank-R.json.

    Elsewhere it costs nothing.

    Attributes: `problem`, why this rank could not write them.
    """

    problem: str | None = None

    def __init__(self, log: Log, device: torch.device, rank: int):
        self.window, self.folder, self.rank = (
            log.profile_window,
            log.profile_folder,
            rank,
        )
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
        if number == self.window[1]:
            self.problem = problem_of(self.close)

    def close(self) -> None:
        """Write what is recorded; also of a run that ends within the window."""
        if self.running is None:
            return
        running, self.running = self.running, None
        running.stop()
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(folder / f"rank-{self.rank}.json"))
