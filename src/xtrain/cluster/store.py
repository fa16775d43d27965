# mypy: disable-error-code="override"
"""A store that all ranks of a cluster share: a dict, and ranks that wait for its keys.

torch's own stores wait inside C++, where no other rank could run meanwhile.
A timeout is in virtual seconds.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from xtrain.cluster.scheduler import Rank, Scheduler


class KeyWait:
    """What a rank waits for that asks for keys."""

    def __init__(self, keys: list[str], size: int, rank: Rank):
        self.keys, self.rank, self._size = keys, rank, size
        self.error: BaseException | None = None

    def describe(self) -> str:
        return f"the store's key {', '.join(self.keys)}"

    def missing(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self.rank.number]

    def fail(self, error: BaseException) -> None:
        self.error = error


class VirtualStore(dist.Store):
    """The keys of one cluster, the same for every rank."""

    def __init__(self, scheduler: Callable[[], Scheduler]):
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}
        self._waits: list[KeyWait] = []

    def set(self, key: str, value: Any) -> None:
        self._scheduler().let_others_run()  # those that are earlier do not see it
        self._put(key, value)

    def _put(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        for waiting in self._waits:
            if key in waiting.keys:
                self._wake(waiting, self._scheduler().current.clock)

    def _wake(self, waiting: KeyWait, time: float) -> None:
        """Its rank goes on, unless a deadlock or another key has let it."""
        if waiting.rank.waits_for is waiting:
            self._scheduler().wake(waiting.rank, time)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        self._scheduler().let_others_run()
        total = int(self._values.get(key, b"0")) + amount
        self._put(key, str(total))
        return total

    def check(self, keys: list[str]) -> bool:
        found = all(key in self._values for key in keys)
        if not found:
            scheduler = self._scheduler()  # it may be asked in a loop
            asked = KeyWait(keys, len(scheduler.stand_ins), scheduler.current)
            scheduler.poll(asked)
            if asked.error is not None:
                raise asked.error
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        scheduler = self._scheduler()
        rank = scheduler.current
        waiting: KeyWait | None = None
        end = None if timeout is None else rank.clock + timeout.total_seconds()

        def give_up() -> None:
            if waiting is not None and rank.waits_for is waiting and end is not None:
                keys = ", ".join(waiting.keys)
                waiting.fail(dist.DistStoreError(f"wait timeout, keys: {keys}"))
                self._wake(waiting, end)

        while any(key not in self._values for key in keys):
            absent = [key for key in keys if key not in self._values]
            if waiting is None and end is not None:
                scheduler.at(end, give_up)
            waiting = KeyWait(absent, len(scheduler.stand_ins), rank)
            self._waits.append(waiting)
            try:
                scheduler.block(waiting)
            finally:
                self._waits.remove(waiting)
            if waiting.error is not None:
                raise waiting.error

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._scheduler().let_others_run()
        before = self._values.get(key)
        asked = expected.encode() if isinstance(expected, str) else bytes(expected)
        if (before is None and not asked) or before == asked:
            self._put(key, desired)
        return self._values.get(key, asked)

    def append(self, key: str, value: Any) -> None:
        self._scheduler().let_others_run()
        more = value.encode() if isinstance(value, str) else bytes(value)
        self._put(key, self._values.get(key, b"") + more)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Waits that name no timeout have none: a deadlock is found at once."""

    # by these names torch's C++ calls them
    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys
    multiGet, multiSet = multi_get, multi_set
