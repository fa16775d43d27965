# mypy: disable-error-code="override,attr-defined,assignment,call-arg,misc"
"""A network that takes its time: gloo, whose all-to-alls arrive after a delay.

    issue at t ------ rows / bandwidth + latency ------> wait returns
                 (the calls of a rank travel one after the other)

No rank computes while a message travels, so what is computed between issue and wait is
really hidden, on 2 cores as on 8: who sleeps needs no core. A message is there so long
after this rank's own issue; ranks that issue at different times are not told apart.

The other collectives are gloo's, without delay.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from xtrain.comm.mesh import timeout_of

NAME = "slow-gloo"


class Delayed(dist.Work):
    """A call whose result may be seen from `ready` on, by `time.perf_counter`."""

    def __init__(self, work: dist.Work, ready: float, sleep: Callable[[float], object]):
        super().__init__()
        self._work, self.ready, self._sleep = work, ready, sleep

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(*[timeout] if timeout else [])
        left = self.ready - time.perf_counter()
        if left > 0:
            self._sleep(left)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.perf_counter() >= self.ready


class SlowNetwork(ProcessGroup):
    """A group on gloo whose all-to-alls are late.

    Attributes:
        latency: seconds that each all-to-all takes at least.
        bandwidth: bytes a second that this rank sends to others.
        sleep: what to do instead of `time.sleep`.
        calls: when each all-to-all was issued and when it is there.
    """

    _device_types = (torch.device("cpu"),)
    _name = _description = ""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore
        self.latency, self.bandwidth = 0.0, float("inf")
        self.sleep: Callable[[float], object] = time.sleep
        self.calls: list[tuple[float, float]] = []

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        """Close gloo's connections."""
        self._gloo = None

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """One tensor's rows to all ranks, late."""
        opts = opts or dist.AllToAllOptions()
        splits, rows = list(input_splits), len(input)
        own = splits[self.rank()] if splits else rows // self.size()
        sent = input.nbytes * (rows - own) // max(rows, 1)
        work = self._gloo.alltoall_base(
            output, input, output_splits, input_splits, opts
        )
        return Delayed(work, self._arrival(sent), self.sleep)

    def _arrival(self, sent: int) -> float:
        """When a call issued now is there."""
        issued = time.perf_counter()
        begin = max(issued, self.calls[-1][1]) if self.calls else issued
        self.calls.append((issued, begin + self.latency + sent / self.bandwidth))
        return self.calls[-1][1]

    def allreduce(self, *arguments: Any, **options: Any) -> dist.Work:
        return self._gloo.allreduce(*arguments, **options)

    def allgather(self, *arguments: Any, **options: Any) -> dist.Work:
        return self._gloo.allgather(*arguments, **options)

    def broadcast(self, *arguments: Any, **options: Any) -> dist.Work:
        return self._gloo.broadcast(*arguments, **options)

    def barrier(self, *arguments: Any, **options: Any) -> dist.Work:
        return self._gloo.barrier(*arguments, **options)

    def send(self, *arguments: Any, **options: Any) -> dist.Work:
        return self._gloo.send(*arguments, **options)

    def recv(self, *arguments: Any, **options: Any) -> dist.Work:
        return self._gloo.recv(*arguments, **options)


def slow_network(
    latency: float,
    bandwidth: float = float("inf"),
    ranks: list[int] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> SlowNetwork:
    """A group of all ranks, or of `ranks`, whose all-to-alls are late.

    Every rank calls it, as `dist.new_group`. Destroy it with
    `dist.destroy_process_group(group)`.

    Args:
        latency: seconds of each all-to-all.
        bandwidth: bytes a second of a rank.
    """
    if latency < 0 or bandwidth <= 0:
        raise ValueError(
            f"latency {latency} and bandwidth {bandwidth}: a network takes time, 0 "
            "seconds at least, and carries something"
        )
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, SlowNetwork, devices=["cpu"])
    group = dist.new_group(ranks, timeout=timeout_of(None), backend=NAME)
    if isinstance(group, SlowNetwork):
        group.latency, group.bandwidth, group.sleep = latency, bandwidth, sleep
    return group  # type: ignore[return-value]
