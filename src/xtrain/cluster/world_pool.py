"""The ranks of `xtrain.testing.World` on "xtrain-virtual": a cluster for every run."""

import pickle

from xtrain.cluster.virtual_cluster import VirtualCluster
from xtrain.evidence import executed
from xtrain.testing import transport
from xtrain.testing.backend_choice import VIRTUAL
from xtrain.testing.outcome import Outcome
from xtrain.testing.transport import PackedCall


class ThreadPool:
    """`size` ranks as threads, with the interface of `testing.pool.Pool`."""

    alive = True

    def __init__(self, size: int):
        self.size = size

    def run(self, call: PackedCall, timeout: float | None) -> list[Outcome]:
        """Make a call on all ranks of a fresh cluster."""
        cluster = VirtualCluster(self.size, checks=False)
        with executed.watching_code(call.watched) as ran:
            values = cluster.run(make, call, timeout=timeout)
        if seen := executed.current():
            seen.on_ranks(tuple(ran.places), VIRTUAL, self.size)
        return [Outcome("returned", value=value, reusable=True) for value in values]

    def start(self) -> None:
        """Threads are started for each run."""

    def stop(self) -> None:
        """No thread is left between runs."""


def make(call: PackedCall) -> bytes:
    """On a rank: make the call; its result, pickled."""
    transport.ensure_module(call.module, call.file)
    fn, args = pickle.loads(call.pickled)
    return transport.dumps(fn(*args))
