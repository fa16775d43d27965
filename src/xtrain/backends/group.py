# mypy: disable-error-code="override,assignment,call-arg,misc"
"""A group of connected ranks: how one joins it, and how it ends."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize
from types import FrameType, SimpleNamespace
from typing import Any

from torch.distributed import Store

from xtrain.backends.arguments import served_device
from xtrain.backends.call_runner import CallRunner
from xtrain.backends.named_group import NamedGroup
from xtrain.backends.peers import PeerMonitor, Peers
from xtrain.backends.progress import Progress


def refuse_other_devices(backend: str) -> None:
    """ValueError when torch is making a group of several backends, as "cpu:a,cuda:b".

    It takes a ProcessGroup in Python for all of the group and drops the other backends
    silently. It does not tell a backend about the others either, so that is read
    in its function that makes groups.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    backends = {} if config is None else config.get_device_backend_map()
    if any(name != backend for name in backends.values()):
        text = ",".join(f"{device}:{name}" for device, name in backends.items())
        raise ValueError(
            f'"{text}": torch would build {backend} alone, because a backend in '
            f"Python serves a whole group; make one group of {backend} and another "
            "of the other backend (dist.new_group)"
        )


class Group(NamedGroup):
    """Joining a group of ranks and leaving it."""

    compares_calls = True  # of all ranks, before any data moves
    give_way = staticmethod(os.sched_yield)  # to others, while this rank waits
    monitor_class: type[PeerMonitor] = PeerMonitor

    def __init__(
        self,
        backend: str,
        make_transport: Callable[[Store, int, int, float, Peers], Any],
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
    ):
        super().__init__(backend, rank, size, served_device())
        refuse_other_devices(backend)
        self._timeout = timeout.total_seconds()
        self._peers = Peers()
        try:
            self._transport = make_transport(
                store, rank, size, self._timeout, self._peers
            )
        except BaseException:
            self._peers.close()
            raise
        self._monitor = self.monitor_class(
            rank, self._transport, self._peers, self._timeout, self._global_rank
        )
        self._progress = Progress(self._monitor.check, self.give_way)
        self._runner = CallRunner(
            backend, rank, self._transport, self._progress, self._monitor,
            self._global_rank, self.compares_calls, self._device,
        )  # fmt: skip
        self.on_collective_end = self._runner.on_collective_end
        # A process that exits leaves the group, as if it had destroyed it.
        self._leave = Finalize(self, self._transport.close, exitpriority=1)

    def _get_sequence_number_for_group(self) -> int:
        """How many calls this rank has made."""
        return self._runner.calls

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of calls from now on that have none of their own."""
        self._monitor.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    @property
    def options(self) -> SimpleNamespace:
        """What torch's own backends tell about themselves here: the timeout."""
        return SimpleNamespace(_timeout=timedelta(seconds=self._monitor.seconds))

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank are told."""
        if not self._runner.closed:
            self._runner.closed = True
            self._progress.close(RuntimeError("this group has been destroyed"))
            self._leave()
            self._runner.kept.clear()
            self._peers.close()

    abort = shutdown
