"""The watchdog: what ends a rank that waits for a call that does not end."""

import os
import signal
import sys

import torch.distributed as dist

from xtrain.backends.nccl_rules.board import LOOK_SECONDS, NcclDeadlock, WaitBoard
from xtrain.backends.nccl_rules.rules import in_words
from xtrain.backends.operation import Operation
from xtrain.backends.peers import PeerMonitor

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class Watchdog(PeerMonitor):
    """Ends the waits of one rank in one group as NCCL does.

    A circle of waits raises. A call that is not over in time ends the process, also if
    a peer has died or left; with TORCH_NCCL_BLOCKING_WAIT=1 it raises.
    """

    board: WaitBoard

    def check(self, operation: Operation) -> None:
        waited = operation.waited()
        if waited > LOOK_SECONDS:
            try:
                self.board.look()
            except NcclDeadlock as error:
                self.broken = error
                raise
        limit = operation.own_timeout() or self.seconds
        if waited > limit:
            self._end(operation, limit)

    def _end(self, operation: Operation, limit: float) -> None:
        needed = operation.peers
        if needed is None:
            needed = self._transport.missing()
        gone = [f"rank {self._global_rank(r)} ({self._peers.state(r)})" for r in needed]
        text = (
            f"{operation.call} is not over after its timeout of {limit:g} s; "
            f"nothing came from: {', '.join(gone) or 'no rank in particular'}"
        )
        if os.environ.get(BLOCKING_WAIT, "0") == "1":
            self.broken = dist.DistBackendError(f"{text} ({BLOCKING_WAIT}=1)")
            raise self.broken
        print(
            f"[rank {self._global_rank(self._rank)}] nccl-rules watchdog: {text}. "
            f"{in_words('watchdog')}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        os.kill(os.getpid(), signal.SIGABRT)
