"""What a test may change in a rank, and how the next test finds it unchanged."""

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

SEED = 20_000
# Closing a gloo group costs 45 ms, and an open one wakes a hundred times a second. So a
# rank keeps what groups tests left behind, and is replaced when there are this many.
MAX_LEFT_GROUPS = 8
# NCCL's do not wake, they hold tens of MB of the GPU's memory, and a new rank costs
# seconds.
MAX_LEFT_ON_CUDA = 16


def _set_path(path: list[str]) -> None:
    sys.path[:] = path


def _set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


# Settings as (read, write); written only when they differ, since some writes are
# slow (use_deterministic_algorithms imports half of torch.compile).
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (os.getcwd, os.chdir),
    (lambda: list(sys.path), _set_path),
    (lambda: list(warnings.filters), _set_filters),
]


class Clean:
    """The state of a rank right after it joined, to return to between runs."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank = rank
        self.most_groups = MAX_LEFT_ON_CUDA if device == "cuda" else MAX_LEFT_GROUPS
        self.group: Any = dist.group.WORLD
        self.environment = dict(os.environ)
        self.settings = [read() for read, _ in _SETTINGS]
        # What exists now stays: later collections look only at what tests left.
        gc.freeze()
        self.restore()

    def untouched(self) -> bool:
        """Whether this run neither communicated nor touched the groups.

        Only then can the ranks be used again after a failure: a message half sent
        would reach the next test.
        """
        return (
            self._intact()
            and self.calls is not None
            and self._calls() == self.calls
            and len(distributed_c10d._world.pg_map) == self.groups
        )

    def reusable(self) -> bool:
        """Whether the rank can serve another run after a successful one."""
        groups = len(distributed_c10d._world.pg_map)
        return self._intact() and groups <= self.most_groups

    def restore(self) -> None:
        """Undo what tests commonly change."""
        # Different on every rank: a forgotten broadcast must not pass by luck.
        torch.manual_seed(SEED + self.rank)
        random.seed(SEED + self.rank)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED + self.rank)
        for (read, write), value in zip(_SETTINGS, self.settings, strict=True):
            if read() != value:
                write(value)
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        gc.collect()
        self.calls = self._calls()
        self.groups = len(distributed_c10d._world.pg_map)

    def _intact(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self.group

    def _calls(self) -> int | None:
        # torch's own backends count every collective, send and receive of a group.
        try:
            return self.group._get_sequence_number_for_group()
        except RuntimeError:
            return None
