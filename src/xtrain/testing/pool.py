"""Living ranks: start them, hand out a job, collect the answers, replace them.

After a run in which every rank answered the pool goes on. After a death, a hang, or
a failure in the middle of communication the process group cannot be trusted: the
ranks are ended and the next run starts new ones, which costs less than 0.1 s.
"""

import atexit
import contextlib
import os
import pickle
import sys

from xtrain.evidence import executed
from xtrain.testing import pretended_device
from xtrain.testing.backend_choice import (
    Choice,
    rank_environment,
    registration,
    this_machine,
)
from xtrain.testing.files import SharedFile
from xtrain.testing.outcome import Outcome
from xtrain.testing.process import RankProcess
from xtrain.testing.rank import RankSpec, rank_main
from xtrain.testing.supervise import collect, explain
from xtrain.testing.transport import PackedCall

START_TIMEOUT = 120.0


class Pool:
    """`size` living ranks on one backend and device."""

    def __init__(
        self, size: int, backend: str, device: str, start_method: str | None
    ) -> None:
        self.size = size
        self.backend = backend
        self.device = device
        # CUDA does not survive a fork, and macOS's own libraries do not either.
        can_fork = sys.platform == "linux" and device != "cuda"
        self._fork = (start_method or ("fork" if can_fork else "spawn")) == "fork"
        self._owner = os.getpid()
        self._ranks: list[RankProcess] = []
        self._idle = False
        self._store: SharedFile | None = None

    @property
    def alive(self) -> bool:
        """Whether every rank is there to take a job."""
        mine = os.getpid() == self._owner
        return mine and bool(self._ranks) and all(rank.alive for rank in self._ranks)

    def start(self) -> None:
        """Start the ranks and wait until each has joined the group."""
        registration(self.backend)  # imported here once, not once per rank
        if self.device == pretended_device.NAME:
            pretended_device.build()
        choice = Choice(self.backend, self.device, "as asked")
        environment = rank_environment(self.size, choice, this_machine())
        self._owner = os.getpid()
        self._store = SharedFile("store")
        atexit.register(self.stop)
        try:
            for rank in range(self.size):
                spec = RankSpec(
                    rank,
                    self.size,
                    self.backend,
                    self.device,
                    self._store.path,
                    environment,
                )
                name = f"xtrain rank {rank}"
                self._ranks.append(RankProcess(name, rank_main, spec, self._fork))
            self._collect(f"start of {self.size} ranks", START_TIMEOUT)
        except BaseException:
            self.stop()
            raise

    def run(self, call: PackedCall, timeout: float | None) -> list[Outcome]:
        """Send one job to all ranks; return their outcomes or raise RankError."""
        try:
            self._tell("run", call)
            return self._collect(call.name, timeout)
        except BaseException:
            # Ctrl-C, for one, leaves the ranks in the middle of the run.
            if not self._idle:
                self.stop()
            raise

    def stop(self) -> None:
        """End all ranks now and forget them."""
        atexit.unregister(self.stop)
        ranks, self._ranks = self._ranks, []
        if os.getpid() != self._owner:
            return  # a forked copy of this object owns no rank
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.close()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _tell(self, order: str, call: PackedCall | None = None) -> None:
        """Send the same message to every rank."""
        self._idle = False
        data = pickle.dumps((order, call))
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # a dead rank: collecting reports it
                rank.jobs.send_bytes(data)

    def _collect(self, name: str, timeout: float | None) -> list[Outcome]:
        ending = collect(self._ranks, timeout)
        error = None
        if not ending.complete(self.size):
            error = explain(name, self._ranks, ending, timeout)
        for rank in self._ranks:
            sys.stderr.write(rank.take_stderr())
        answers = [ending.answers.get(rank) for rank in range(self.size)]
        if seen := executed.current():
            for answer in ending.answers.values():
                seen.on_ranks(answer.executed, self.backend, self.size)
        if all(answer is not None and answer.reusable for answer in answers):
            self._tell("reset")
            self._idle = True
        else:
            self.stop()
        if error is not None:
            raise error
        return [answer for answer in answers if answer is not None]
