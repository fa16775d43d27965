"""World: a group of ranks on this machine that stays alive between runs; and Worlds."""

import importlib
import os
import pickle
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from xtrain.testing.backend_choice import VIRTUAL, this_machine
from xtrain.testing.pool import Pool
from xtrain.testing.transport import dump_call

# For a run, where every rank has a core; a slow machine needs ten times a quick one.
SECONDS = 120.0
# Where it has a GPU: kernels are loaded and communicators made at their first use.
GPU_SECONDS = 120.0
# Sizes 1, 2, 3, 4 and 8 together; an idle forked rank keeps 10 MB of its own.
MAX_RANKS = 18


def patience(size: int, cores: int, gpus: int | None) -> float:
    """Seconds for a run: as many times more as ranks share a core or a GPU.

    Ranks of a GPU compute in turns, and a kernel that waits for another rank's uses
    its turn up.
    """
    if not gpus:
        return SECONDS * max(1.0, size / cores)
    return GPU_SECONDS * max(1.0, size / cores, size / gpus)


def pool_of(size: int, backend: str, device: str, start_method: str | None) -> Any:
    """What runs the ranks of a World: processes, or the threads of a virtual cluster.

    The latter is found by name: it stands above this module.
    """
    if backend != VIRTUAL:
        return Pool(size, backend, device, start_method)
    return importlib.import_module("xtrain.cluster.world_pool").ThreadPool(size)


class World:
    """`size` processes that form one default process group.

    The ranks start at the first `run` (forked on Linux with a CPU device, under
    0.1 s; spawned on CUDA and macOS) and serve every later one, so a run costs about
    as much as its communication. Between runs a rank is reset: seeds (different on
    each rank), default dtype and device, grad mode, deterministic mode, threads,
    working directory, environment. Ranks that died, failed in the middle of
    communication, or lost the default group are replaced.

    On CUDA rank r uses GPU r modulo their number and creates tensors there.
    """

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        device: str = "cpu",
        start_method: str | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a World needs at least one rank, got size={size}")
        if start_method not in (None, "fork", "spawn"):
            raise ValueError(f"start_method {start_method!r} is neither fork nor spawn")
        self.size = size
        self.backend = backend
        self.device = device
        self._pool = pool_of(size, backend, device, start_method)
        self._finalizer = weakref.finalize(self, self._pool.stop)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | Literal["default"] | None = "default",
    ) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in rank order.

        `fn` is found by name on the ranks, so it lives at the top level of a
        module; rank and size come from `torch.distributed`. Tensors in the results
        are detached and on the CPU.

        Raises RankError, which is also an instance of the first failing rank's
        exception type; RankDied when a rank's process ended; RankTimeout after
        `timeout` seconds, showing where every rank was: see `patience`.
        """
        if timeout == "default":
            gpus = this_machine().gpus if self.device == "cuda" else None
            timeout = patience(self.size, os.cpu_count() or 1, gpus)
        call = dump_call(fn, args, self.backend, self.size)
        if not self._pool.alive:
            self._pool.stop()
            self._pool.start()
        outcomes = self._pool.run(call, timeout)
        return [pickle.loads(outcome.value) for outcome in outcomes]

    def close(self) -> None:
        """End the ranks. A later `run` would start new ones."""
        self._pool.stop()

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"World({self.size}, {self.backend!r}, {self.device!r})"


class Worlds:
    """One World per size, the least recently used ones closed above `max_ranks`.

    A World that was closed starts again at its next run, so a test may hold several.
    """

    def __init__(self, backend: str, device: str, max_ranks: int = MAX_RANKS) -> None:
        self.backend = backend
        self.device = device
        self.max_ranks = max_ranks
        self._worlds: dict[int, World] = {}

    def get(self, size: int) -> World:
        """The World of this size."""
        world = self._worlds.pop(size, None) or World(size, self.backend, self.device)
        others = sum(self._worlds)
        while self._worlds and others + size > self.max_ranks:
            oldest = next(iter(self._worlds))
            self._worlds.pop(oldest).close()
            others -= oldest
        self._worlds[size] = world  # a dict keeps the order of use
        return world

    def close(self) -> None:
        """End all ranks."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
