"""Walk through a rank's list of actions: compute, send, receive, reduce.

rank 1   1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 ... 1BW0 1SEND_B0 ... 1REDUCE
"""

import time
from collections.abc import Callable

from xtrain.pipeline_parallel.agreement import NothingArrived
from xtrain.pipeline_parallel.computations import Computations
from xtrain.pipeline_parallel.failure import StepFailure
from xtrain.pipeline_parallel.messages import Messages
from xtrain.schedules import Action
from xtrain.schedules.action import REDUCE


class Executor:
    """One step of a rank; `reduce` sums a stage's gradients over the data ranks."""

    def __init__(
        self,
        computations: Computations,
        messages: Messages,
        reduce: Callable[[int], None],
    ):
        self.computations, self.messages = computations, messages
        self._reduce = reduce
        self.failure = StepFailure(messages.group)
        self.executed: list[Action] = []
        self.times: list[tuple[float, float]] = []

    def run(self) -> None:
        """Do every action; after a failure only those that other ranks wait for."""
        for action in self.messages.schedule.actions[self.messages.rank]:
            begin = time.perf_counter()
            key = action.kind[-1], action.stage, action.micro_batch
            if action.kind in ("SEND_F", "SEND_B"):
                outgoing = self.computations.outgoing.pop(key, None)
                self.messages.send(action, outgoing)
            elif action.kind in ("RECV_F", "RECV_B"):
                self.computations.ready[key] = self.messages.recv(action)
                if self.messages.has_failed(action):
                    self.failure.keep(NothingArrived())
            elif action.kind == REDUCE:
                with self.failure.caught(action, reducing=True):
                    self._reduce(action.stage)
            elif self.failure.error is None:
                with self.failure.caught(action):
                    self.computations.run(action)
            else:
                continue
            self.executed.append(action)
            self.times.append((begin, time.perf_counter()))
        self.messages.finish()
