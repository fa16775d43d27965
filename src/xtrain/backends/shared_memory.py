"""The transport of ranks of one host: memory that they all see.

Every rank owns a segment that all others map. A collective is: write into your own
segment, wait until all have, read from theirs. No message is sent, and nothing is
copied more often than these two steps ask for. The wait is `step_barrier`; on it stand
the algorithms of `shared_all_reduce` and `shared_collectives`.

Tensors that live in shared memory themselves (`shared_empty`) need no stage.
"""

import os

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends import shared_collectives
from xtrain.backends.calls import compare
from xtrain.backends.messages import MAX_MESSAGE_BYTES, Inbox
from xtrain.backends.operation import Steps
from xtrain.backends.peers import Peers
from xtrain.backends.rendezvous import Rendezvous
from xtrain.backends.segments import (
    ARRIVED,
    DESCRIBED,
    FINGERPRINT,
    LEFT,
    MAX_RANKS,
    SIDEBAND,
    STAGE_BYTES,
    TEXT_BYTES,
    TEXT_OFFSET,
    Channel,
    Segment,
    fence,
    join_segments,
    length_for,
    make_memory,
)
from xtrain.backends.shared_all_reduce import all_reduce_large, all_reduce_one_shot
from xtrain.backends.shared_tensors import SharedTensors
from xtrain.comm.reduce_op import reduce_into

MAX_VIEWS = 256  # kept; a program uses a few sizes again and again


class SharedMemory:
    """The transport of one group; see the module's text.

    Args:
        store: where the ranks tell each other their process and segment.
        peers: watches the other ranks' processes.

    `sent` and `received` count the bytes of tensors that collectives wrote into this
    rank's stage and read from the others' stages.
    """

    # A rank that died in a call has left all it will ever leave.
    DEATH_GRACE_SECONDS = 0.0
    ONE_SHOT_BYTES = 256 << 10  # up to here one step beats two
    PIECE_BYTES = STAGE_BYTES  # of a larger all-reduce at a time, at most a stage
    reduce_into = staticmethod(reduce_into)

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, peers: Peers
    ):
        if size > MAX_RANKS:
            raise ValueError(f"xtrain-shm serves up to {MAX_RANKS} ranks, got {size}")
        if not hasattr(os, "memfd_create"):
            raise RuntimeError('xtrain-shm needs Linux; use "xtrain-socket" here')
        self.rank, self.size = rank, size
        self.step = self.sent = self.received = 0
        self.in_call = False
        self.line_mismatch: list[int] = []  # all ranks' fingerprints of a call
        descriptor = make_memory(length_for(size))
        try:
            self.mine = Segment(descriptor, size)
            with Rendezvous(store, "shm", rank, size, timeout, peers) as rendezvous:
                self.segments, pids = join_segments(
                    rendezvous, self.mine, descriptor, rank, size
                )
        except BaseException:
            self.mine.words[LEFT] = 1  # for those who have mapped it already
            raise
        finally:
            os.close(descriptor)  # all ranks have mapped it
        self.words = [segment.words for segment in self.segments]
        self.shared = SharedTensors(rank, pids)
        self._views: dict[tuple, list[Tensor]] = {}
        self._cuts: dict[tuple, list[tuple[Tensor, ...]]] = {}
        self.others = [peer for peer in range(size) if peer != rank]
        self.outbox = {
            peer: Channel(self.mine, rank, self.segments[peer], peer)
            for peer in self.others
        }
        self.inbox = {
            peer: Inbox(
                peer,
                Channel(self.segments[peer], peer, self.mine, rank),
                MAX_MESSAGE_BYTES,
            )
            for peer in self.others
        }

    # -- one step ---------------------------------------------------------------------

    def step_barrier(self, check: int = 0, sideband: int = 0) -> Steps:
        """Complete a step: return when all ranks have.

        Args:
            check: fingerprint of the call; all ranks' must be equal but for the line.
            sideband: one number that the others read in this step's `sidebands`.
        """
        self.step += 1
        step, words = self.step, self.mine.words
        words[FINGERPRINT + step % 2] = check
        words[SIDEBAND + step % 2] = sideband
        fence()  # what was staged is visible before the arrival is
        words[ARRIVED] = step
        for peer in self.others:
            peer_words = self.words[peer]
            while peer_words[ARRIVED] < step:
                yield
        fence()
        if check:
            for peer in self.others:
                if self.words[peer][FINGERPRINT + step % 2] != check:
                    checks = [words[FINGERPRINT + step % 2] for words in self.words]
                    self.line_mismatch = compare(checks)
                    break

    def sidebands(self) -> list[int]:
        """What each rank gave as `sideband` in this step."""
        return [words[SIDEBAND + self.step % 2] for words in self.words]

    def missing(self) -> list[int]:
        """The ranks that have not come to this rank's call."""
        return [peer for peer in self.others if self.words[peer][ARRIVED] < self.step]

    def lost(self) -> list[int]:
        """The ranks whose connection broke: memory has none that could."""
        return []

    def left(self) -> list[int]:
        """The ranks that have destroyed the group."""
        return [peer for peer in self.others if self.words[peer][LEFT]]

    def describe(self, text: str) -> Steps:
        """Exchange descriptions of the calls in which the ranks disagree."""
        encoded = text.encode()[: TEXT_BYTES - 8]
        start = TEXT_OFFSET + 8
        self.mine.bytes[start : start + len(encoded)] = encoded
        self.mine.bytes[TEXT_OFFSET:start] = len(encoded).to_bytes(8, "little")
        fence()
        self.mine.words[DESCRIBED] = self.step
        for peer in self.others:
            while self.words[peer][DESCRIBED] < self.step:
                yield

    def description(self, peer: int) -> str:
        data = self.segments[peer].bytes
        length = int.from_bytes(data[TEXT_OFFSET : TEXT_OFFSET + 8], "little")
        return bytes(data[TEXT_OFFSET + 8 : TEXT_OFFSET + 8 + length]).decode()

    # -- collectives: flat contiguous tensors, `check` the call's fingerprint ----------

    barrier = step_barrier

    def all_reduce(self, flat: Tensor, op: ReduceOp.RedOpType, check: int) -> Steps:
        if flat.nbytes <= self.ONE_SHOT_BYTES:
            return all_reduce_one_shot(self, flat, op, check)
        return all_reduce_large(self, flat, op, check)

    all_gather = shared_collectives.all_gather
    all_to_all = shared_collectives.all_to_all
    broadcast = shared_collectives.broadcast
    reduce = shared_collectives.reduce
    reduce_scatter = shared_collectives.reduce_scatter

    # -- for the algorithms ------------------------------------------------------------

    def stages(self, step: int, dtype: torch.dtype, count: int) -> list[Tensor]:
        """The first `count` elements of all ranks' stages of a step."""
        key = (step % 2, dtype, count)
        if key not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = [s.stage(step, dtype)[:count] for s in self.segments]
        return self._views[key]

    def slices(
        self, step: int, dtype: torch.dtype, count: int
    ) -> list[tuple[Tensor, ...]]:
        """The same, cut into a slice for each rank."""
        key = (step % 2, dtype, count)
        if key not in self._cuts:
            if len(self._cuts) >= MAX_VIEWS:
                self._cuts.clear()
            stages = self.stages(step, dtype, count)
            self._cuts[key] = [stage.tensor_split(self.size) for stage in stages]
        return self._cuts[key]

    def count(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received

    def close(self) -> None:
        """Tell the others, and let go of all memory."""
        self.mine.words[LEFT] = 1
        for inbox in self.inbox.values():
            inbox.close()
        self.inbox.clear()
        self.outbox.clear()
        self.words.clear()
        self.shared.clear()
        self._views.clear()
        self._cuts.clear()
        self.segments.clear()
        del self.mine
