"""The parent's side: start the ranks, hand out a job, collect, replace."""

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from xtrain.testing.errors import RankDied, RankError, RankReport, RankTimeout, raised
from xtrain.testing.files import SharedFile
from xtrain.testing.rank import Outcome, Seat, rank_main

# After one rank failed, the others get this long to fail or finish by themselves.
GRACE = 1.0
START_TIMEOUT = 60.0


class Pool:
    """Living ranks of one size, backend and device."""

    def __init__(self, size: int, backend: str, device: str) -> None:
        self.size = size
        self.backend = backend
        self.device = device
        self.owner = os.getpid()
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.files: list[SharedFile] = []

    def start(self) -> None:
        """Start the ranks and wait until each has joined the group."""
        fork = sys.platform == "linux" and self.device == "cpu"
        context = multiprocessing.get_context("fork" if fork else "spawn")
        self.files = [SharedFile("store")]
        self.files += [SharedFile(f"rank-{rank}") for rank in range(self.size)]
        for rank in range(self.size):
            seat = Seat(
                rank,
                self.size,
                self.backend,
                self.device,
                self.files[0].path,
                self.files[1 + rank].path,
                self.owner,
            )
            here, there = context.Pipe()
            process = context.Process(
                target=rank_main, args=(seat, there), name=f"xtrain rank {rank}"
            )
            with warnings.catch_warnings():
                # Python 3.12 warns about fork beside threads; ranks use none of them.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)
        atexit.register(self.stop)
        self._collect(START_TIMEOUT)

    @property
    def alive(self) -> bool:
        """Whether every rank is there to take a job."""
        return bool(self.processes) and all(p.is_alive() for p in self.processes)

    def run(
        self, call: tuple[str, str, bytes], timeout: float | None
    ) -> list[Outcome]:
        """Send one job to all ranks; return their outcomes or raise RankError."""
        message = pickle.dumps(("run", *call))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        outcomes = self._collect(timeout)
        if all(outcome.usable for outcome in outcomes):
            for pipe in self.pipes:
                pipe.send(("reset",))
        else:
            self.stop()
        return outcomes

    def _collect(self, timeout: float | None) -> list[Outcome]:
        answers: dict[int, Outcome] = {}
        dead: set[int] = set()
        deadline = None if timeout is None else time.monotonic() + timeout
        failed = False
        try:
            while len(answers) + len(dead) < self.size:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                waiting = {
                    self.pipes[r]: r
                    for r in range(self.size)
                    if r not in answers and r not in dead
                }
                for pipe in wait(list(waiting), left):
                    rank = waiting[pipe]
                    try:
                        answers[rank] = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        dead.add(rank)
                bad = dead or any(a.kind == "raised" for a in answers.values())
                if bad and not failed:
                    failed = True
                    grace = time.monotonic() + GRACE
                    deadline = grace if deadline is None else min(deadline, grace)
        except BaseException:
            self.stop()
            raise
        if len(answers) < self.size or failed:
            error = self._error(answers, dead, timeout)
            self.stop()
            raise error
        return [answers[rank] for rank in range(self.size)]

    def _error(
        self, answers: dict[int, Outcome], dead: set[int], timeout: float | None
    ) -> RankError:
        reports = []
        for rank in range(self.size):
            written = self.files[1 + rank].take()
            if rank in dead:
                self.processes[rank].join(1)
                reports.append(
                    RankReport(rank, "died", self._death(rank), written.strip())
                )
            elif rank not in answers:
                reports.append(RankReport(rank, "waiting", "still running"))
            elif answers[rank].kind == "raised":
                outcome = answers[rank]
                error = pickle.loads(outcome.error) if outcome.error else None
                reports.append(
                    RankReport(rank, "raised", outcome.summary, outcome.traceback, error)
                )
            else:
                reports.append(RankReport(rank, "returned"))
        if dead:
            first = reports[min(dead)]
            return RankDied(f"rank {first.rank} {first.summary}", reports, first)
        failures = [r for r, a in answers.items() if a.kind == "raised"]
        if failures:
            first = min(failures, key=lambda rank: answers[rank].at)
            return raised(reports[first], reports)
        stuck = next(r for r in reports if r.kind == "waiting")
        return RankTimeout(f"not finished after {timeout} s", reports, stuck)

    def _death(self, rank: int) -> str:
        code = self.processes[rank].exitcode
        if code is None or code >= 0:
            return f"exited with code {code}"
        return f"died by {signal.Signals(-code).name}"

    def stop(self) -> None:
        """End all ranks and forget them."""
        if os.getpid() != self.owner:
            return  # a forked copy of this object owns no rank
        atexit.unregister(self.stop)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        for file in self.files:
            file.close()
        self.processes, self.pipes, self.files = [], [], []
