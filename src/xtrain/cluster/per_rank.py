"""What belongs to a rank although Python and torch keep it once per process.

    per rank      torch's process groups, random numbers (torch's, Python's),
                  os.environ, the default dtype
    per thread    grad mode, autocast, dispatch modes, hooks of saved tensors, the
                  default device: nothing to do, a rank is a thread
    shared        everything else: modules, warnings, the working directory, matmul
                  precision. What one rank changes, all see

What belongs to a rank is exchanged when the turn passes, a microsecond each.
`replaced` does so with any attribute.
"""

import contextlib
import os
import random
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from xtrain.cluster import running

SEED = 20_000  # plus the rank: a forgotten broadcast must not pass by luck
_C10D: Any = torch._C._distributed_c10d
_GENERATOR = torch.default_generator


class RankWorld:
    """The process groups of one rank, as torch keeps them for a process."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict = {}
        self.pg_names: dict = {}
        self.pg_group_ranks: dict = {}
        self.pg_backend_config: dict = {}
        self.group_count = 0
        self.tags_to_pg: dict = {}
        self.pg_to_tag: dict = {}
        self.pg_coalesce_state: dict = {}
        self.comms: list = []

    pg_config_info = c10d._World.pg_config_info


class RankEnviron(MutableMapping):
    """The environment of the process with changes of one rank."""

    def __init__(self, base: MutableMapping, own: dict[str, str]):
        self._base, self._own = base, own
        self._deleted: set[str] = set()

    def __getitem__(self, key: str) -> str:
        if key in self._own:
            return self._own[key]
        if key in self._deleted:
            raise KeyError(key)
        return self._base[key]

    def __setitem__(self, key: str, value: str) -> None:
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"environ holds str, got {key!r}={value!r}")
        self._own[key] = value

    def __delitem__(self, key: str) -> None:
        self[key]  # KeyError where there is none
        self._own.pop(key, None)
        self._deleted.add(key)

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        for key in self._base:
            if key not in self._own and key not in self._deleted:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[str, str]:
        return dict(self)

    def __or__(self, other: Any) -> dict[str, str]:
        return {**self, **dict(other)}

    def __ior__(self, other: Any) -> "RankEnviron":
        self.update(other)
        return self


class RankState:
    """What is exchanged at every handover."""

    __slots__ = (
        "device", "dtype", "environ", "late_works", "main", "numbers", "open_works",
        "random", "replaced", "world",
    )  # fmt: skip

    def __init__(self, rank: int, size: int, dtype: torch.dtype):
        self.world = RankWorld()
        self.environ = RankEnviron(os.environ, {
            "RANK": str(rank), "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        })  # fmt: skip
        self.random = random.Random(SEED + rank)
        self.numbers = torch.Generator().manual_seed(SEED + rank).get_state()
        self.dtype = dtype
        self.main: ModuleType | None = None  # __main__, where a script runs
        self.open_works: dict[int, Any] = {}  # see `works.VirtualWork`
        self.device: Any = None  # see `compute.Device`
        self.late_works: deque[Any] = deque(maxlen=16)
        self.replaced: list[
            tuple[Any, str, Any, Any]
        ] = []  # with what was there before

    def save(self) -> None:
        """Keep what the process has now: this rank stops."""
        self.numbers = _GENERATOR.get_state()
        self.dtype = torch.get_default_dtype()
        for target, name, _, before in reversed(self.replaced):
            setattr(target, name, before)

    def load(self) -> None:
        """Give the process what is this rank's: it goes on."""
        _GENERATOR.set_state(self.numbers)
        c10d._world = self.world  # type: ignore[assignment]
        os.environ = self.environ  # type: ignore[assignment]  # noqa: B003
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        if self.main is not None:
            sys.modules["__main__"] = self.main
        for target, name, value, _ in self.replaced:
            setattr(target, name, value)


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or a class, for this rank alone.

    In a process, which has its own modules, that is all it does.
    """
    cluster, before = running.cluster(), vars(target)[name]
    own = [] if cluster is None else cluster.scheduler.current.state.replaced
    own.append((target, name, value, before))
    setattr(target, name, value)
    try:
        yield
    finally:
        own.pop()
        setattr(target, name, before)


class Process:
    """What the process has before a cluster runs, to be put back after it.

    Meanwhile `time.sleep` lets virtual time pass, and the functions of `random` draw
    from the numbers of the rank that calls.

    Args:
        on_rank: the rank whose thread this is; None on other threads.
    """

    def __init__(self, on_rank: Callable[[], Any]):
        self._on_rank = on_rank

    def __enter__(self) -> None:
        self._world, self._environ = c10d._world, os.environ
        self._numbers, self._dtype = _GENERATOR.get_state(), torch.get_default_dtype()
        self._threads = torch.get_num_threads()
        self._hook, self._filters = sys.excepthook, list(warnings.filters)
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._functions = {
            name: function
            for name, function in vars(random).items()
            if getattr(function, "__self__", None) is getattr(random, "_inst", None)
        }
        for name, function in self._functions.items():
            setattr(random, name, _of_rank(name, function, self._on_rank))
        self._sleep: Any = time.sleep
        time.sleep = _sleeping(time.sleep, self._on_rank)  # type: ignore[assignment]
        _C10D._set_thread_isolation_mode(True)
        torch.set_num_threads(1)

    def __exit__(self, *exception: object) -> None:
        _C10D._set_thread_isolation_mode(False)
        for name, function in self._functions.items():
            setattr(random, name, function)
        time.sleep = self._sleep
        c10d._world, os.environ = self._world, self._environ  # type: ignore[assignment]
        _GENERATOR.set_state(self._numbers)
        torch.set_default_dtype(self._dtype)
        torch.set_num_threads(self._threads)
        if torch.are_deterministic_algorithms_enabled() != self._deterministic:
            torch.use_deterministic_algorithms(self._deterministic)
        sys.excepthook = self._hook
        warnings.filters[:] = self._filters  # type: ignore[index]


def _of_rank(
    name: str, function: Callable[..., Any], on_rank: Callable[[], Any]
) -> Callable[..., Any]:
    """A function of `random` that draws from the running rank's numbers."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        rank = on_rank()
        own = function if rank is None else getattr(rank.state.random, name)
        return own(*args, **kwargs)

    return draw


def _sleeping(
    sleep: Callable[[float], None], on_rank: Callable[[], Any]
) -> Callable[[float], None]:
    """`time.sleep` that lets other ranks run, in virtual time."""

    def virtual_sleep(seconds: float) -> None:
        if on_rank() is None:
            sleep(seconds)
        elif seconds < 0:
            raise ValueError("sleep length must be non-negative")
        else:
            running.cluster().advance(seconds)
            running.cluster().scheduler.let_others_run()

    return virtual_sleep
