"""Collectives of the ranks of one host through memory they all see.

Every rank owns a segment that all others map. A collective is: write into your own
segment, wait until all have, read from theirs. No message is sent, and nothing is
copied more often than these two steps ask for.

Small all-reduces are one step: everybody writes its tensor, then adds up everybody's.
Large ones go in pieces that fit the stage, each in two steps: everybody writes its
piece; rank r adds up slice r of all; everybody collects the finished slices. Every byte
is read once to be reduced and once to be collected, however many ranks there are.

Tensors that live in shared memory themselves (`shared_empty`) need no stage.
"""

import contextlib
import ctypes
import os
from array import array

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.calls import CollectiveMismatch, compare
from xtrain.backends.liveness import Peers
from xtrain.backends.messages import MAX_MESSAGE_BYTES, Inbox
from xtrain.backends.pieces import BLOCK_BYTES, nbytes_of, pieces
from xtrain.backends.progress import Steps
from xtrain.backends.rendezvous import Rendezvous, host_key
from xtrain.backends.segments import (
    ARRIVED,
    DESCRIBED,
    FINGERPRINT,
    JOINED,
    LEFT,
    MAX_RANKS,
    RECV_COUNTS,
    SEND_COUNTS,
    SIDEBAND,
    STAGE_BYTES,
    TEXT_BYTES,
    TEXT_OFFSET,
    Channel,
    Segment,
    fence,
    length_for,
    make_memory,
    open_segment,
)
from xtrain.backends.shared_tensors import SharedTensors
from xtrain.comm.reduce_op import reduce_into

ONE_SHOT_BYTES = 256 << 10  # up to here one step beats two
IN_PLACE_BYTES = 4 << 20  # of a shared tensor at a time: what all have stays cached
MAX_VIEWS = 256  # kept; a program uses a few sizes again and again


class SharedMemory:
    """The transport of one group; see the module's text.

    Args:
        store: where the ranks tell each other their process and segment.
        peers: watches the other ranks' processes.

    `sent` and `received` count the bytes of tensors that collectives wrote into this
    rank's stage and read from the others' stages.
    """

    DEATH_GRACE_SECONDS = (
        0.0  # a rank that died in a call has left all it will ever leave
    )

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
            self.segments = self._map_all(store, timeout, peers, descriptor)
        except BaseException:
            self.mine.words[LEFT] = 1  # for those who have mapped it already
            raise
        finally:
            os.close(descriptor)  # everyone has mapped it
        self.words = [segment.words for segment in self.segments]
        self.shared = SharedTensors(self.rank, self.pids)
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

    def _map_all(
        self, store: Store, timeout: float, peers: Peers, descriptor: int
    ) -> list[Segment]:
        rank, size = self.rank, self.size
        with Rendezvous(store, "shm", rank, size, timeout, peers) as rendezvous:
            addresses, group = rendezvous.exchange_addresses(str(descriptor))
            self.pids = [address.pid for address in addresses]
            for peer, address in enumerate(addresses):
                if address.host != host_key():
                    raise RuntimeError(
                        f"xtrain-shm: rank {peer} runs on another host than rank "
                        f"{rank}; shared memory serves one host, use "
                        '"xtrain-socket" across hosts'
                    )
            # A segment is believed once it shows the group's number and its owner's
            # rank: then its owner has read the same lines, and mapped every segment.
            number = int.from_bytes(group[:7], "little") << 6
            segments = {rank: self.mine}

            def unknown() -> list[int]:
                return [
                    peer
                    for peer in range(size)
                    if peer not in segments
                    or segments[peer].words[JOINED] != number + peer
                ]

            def all_known() -> bool:
                for peer, address in enumerate(addresses):
                    if peer not in segments:
                        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                            segments[peer] = open_segment(
                                peer, address.pid, address.endpoint, size
                            )
                if len(segments) == size:
                    self.mine.words[JOINED] = number + rank
                    for peer, segment in segments.items():
                        shown = segment.words[JOINED]  # once: it is set meanwhile
                        if shown not in (0, number + peer):
                            raise RuntimeError(
                                f"xtrain-shm: what the store holds for rank {peer} "
                                "leads to memory of another rank or group, or it was "
                                "given other lines"
                            )
                return not unknown()

            rendezvous.wait_until(
                all_known,
                lambda: f"ranks {unknown()} did not map the memory of this group",
            )
        return [segments[peer] for peer in range(size)]

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
                    everyone = [words[FINGERPRINT + step % 2] for words in self.words]
                    self.line_mismatch = compare(everyone)
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

    def barrier(self, check: int) -> Steps:
        yield from self.step_barrier(check)

    def all_reduce(self, flat: Tensor, op: ReduceOp.RedOpType, check: int) -> Steps:
        if nbytes_of(flat) <= ONE_SHOT_BYTES:
            yield from self._all_reduce_at_once(flat, op, check)
            return
        location = self.shared.locate(flat)
        yield from self.step_barrier(check, location)
        if location and set(self.sidebands()) == {location}:
            yield from self._all_reduce_in_place(self.shared.at(location, flat), op)
            return
        for piece in flat.split(STAGE_BYTES // flat.element_size()):
            yield from self._all_reduce_piece(piece, op)

    def _all_reduce_at_once(
        self, flat: Tensor, op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        step, nbytes = self.step + 1, nbytes_of(flat)
        stages = self._stages(step, flat.dtype, flat.numel())
        # torch's copy_ takes longer to find out what to do than to do it.
        ctypes.memmove(stages[self.rank].data_ptr(), flat.data_ptr(), nbytes)
        yield from self.step_barrier(check)
        reduce_into(flat, stages, op)  # in rank order: all ranks get the same bits
        self._count(nbytes, (self.size - 1) * nbytes)

    def _all_reduce_piece(self, piece: Tensor, op: ReduceOp.RedOpType) -> Steps:
        """Slice r is reduced by rank r, which reads its own share where it is."""
        rank, step, count = self.rank, self.step + 1, piece.numel()
        slots = piece.tensor_split(self.size)
        stages = self._slices(step, piece.dtype, count)
        for peer in self.others:
            stages[rank][peer].copy_(slots[peer])
        yield from self.step_barrier()
        shares = [stage[rank] for stage in stages]
        shares[rank] = slots[rank]
        finished = self._stages(step + 1, piece.dtype, len(slots[0]))
        reduce_into(finished[rank][: len(shares[0])], shares, op)
        yield from self.step_barrier()
        for slot, source in zip(slots, finished, strict=True):
            slot.copy_(source[: len(slot)])
        whole, own = nbytes_of(piece), nbytes_of(slots[rank])
        self._count(whole, (self.size - 1) * own + whole - own)

    def _all_reduce_in_place(
        self, tensors: list[Tensor], op: ReduceOp.RedOpType
    ) -> Steps:
        """The same without a stage, on tensors that all ranks see: rank's own first."""
        part = IN_PLACE_BYTES // tensors[0].element_size()
        block = BLOCK_BYTES // tensors[0].element_size()
        for pieces_ in zip(*(tensor.split(part) for tensor in tensors), strict=True):
            slots = [piece.tensor_split(self.size) for piece in pieces_]
            order = [self.rank, *self.others]
            shares = [slots[peer][self.rank].split(block) for peer in order]
            for blocks in zip(*shares, strict=True):
                reduce_into(blocks[0], list(blocks), op)
            yield from self.step_barrier()
            mine = slots[self.rank]
            for peer in self.others:
                mine[peer].copy_(slots[peer][peer])
            whole, own = nbytes_of(pieces_[0]), nbytes_of(mine[self.rank])
            self._count(own, (self.size - 1) * own + whole - own)
        yield from self.step_barrier()  # nobody reads this rank's tensor any more

    def broadcast(self, flat: Tensor, root: int, check: int) -> Steps:
        for piece in pieces(flat, STAGE_BYTES):
            stage = self.segments[root].stage(self.step + 1, flat.dtype)[
                : piece.numel()
            ]
            if self.rank == root:
                stage.copy_(piece)
                self._count(nbytes_of(piece), 0)
            yield from self.step_barrier(check)
            check = 0
            if self.rank != root:
                piece.copy_(stage)
                self._count(0, nbytes_of(piece))

    def reduce(
        self, flat: Tensor, root: int, op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        for piece in pieces(flat, STAGE_BYTES):
            step, count = self.step + 1, piece.numel()
            self.mine.stage(step, flat.dtype)[:count].copy_(piece)
            self._count(nbytes_of(piece), 0)
            yield from self.step_barrier(check)
            check = 0
            if self.rank == root:
                shares = [s.stage(step, flat.dtype)[:count] for s in self.segments]
                reduce_into(piece, shares, op)
                self._count(0, (self.size - 1) * nbytes_of(piece))

    def reduce_scatter(
        self, output: Tensor, inputs: list[Tensor], op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        part = STAGE_BYTES // self.size // 8 * 8 // output.element_size()
        own = inputs[self.rank]
        if own.data_ptr() == output.data_ptr():  # in place: it is read once more
            own = own.clone()
        for start in range(0, max(1, *(t.numel() for t in inputs)), part):
            step = self.step + 1
            stage = self.mine.stage(step, output.dtype)
            for peer in self.others:
                piece = inputs[peer][start : start + part]
                stage[peer * part : peer * part + piece.numel()].copy_(piece)
                self._count(nbytes_of(piece), 0)
            yield from self.step_barrier(check)
            check = 0
            target, offset = output[start : start + part], self.rank * part
            shares = [
                s.stage(step, output.dtype)[offset : offset + target.numel()]
                for s in self.segments
            ]
            shares[self.rank] = own[start : start + part]
            reduce_into(target, shares, op)
            self._count(0, (self.size - 1) * nbytes_of(target))

    def all_gather(self, outputs: list[Tensor], input: Tensor, check: int) -> Steps:
        part = STAGE_BYTES // input.element_size()
        for start in range(0, max(1, *(t.numel() for t in outputs)), part):
            step = self.step + 1
            piece = input[start : start + part]
            self.mine.stage(step, input.dtype)[: piece.numel()].copy_(piece)
            yield from self.step_barrier(check)
            check = 0
            self._count(nbytes_of(piece), 0)
            for peer in self.others:
                target = outputs[peer][start : start + part]
                stage = self.segments[peer].stage(step, input.dtype)
                target.copy_(stage[: target.numel()])
                self._count(0, nbytes_of(target))
        outputs[self.rank].copy_(input)

    def all_to_all(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Steps:
        """Pieces of any sizes; a piece that a rank does not send or expect is empty."""
        dtype, itemsize = inputs[0].dtype, inputs[0].element_size()
        part = STAGE_BYTES // self.size // 8 * 8 // itemsize
        self._publish_counts([t.numel() for t in inputs], [t.numel() for t in outputs])
        longest = max(t.numel() for t in (*inputs, *outputs))
        mine, done, rounds = -(-longest // part), 0, 1
        while done < rounds:
            step, start = self.step + 1, done * part
            stage = self.mine.stage(step, dtype)
            for peer in self.others:
                piece = inputs[peer][start : start + part]
                stage[peer * part : peer * part + piece.numel()].copy_(piece)
                self._count(nbytes_of(piece), 0)
            yield from self.step_barrier(check, mine)
            if done == 0:
                self._compare_counts()
            check, done = 0, done + 1
            rounds = max(rounds, *self.sidebands())
            offset = self.rank * part
            for peer in self.others:
                target = outputs[peer][start : start + part]
                source = self.segments[peer].stage(step, dtype)
                target.copy_(source[offset : offset + target.numel()])
                self._count(0, nbytes_of(target))
        outputs[self.rank].copy_(inputs[self.rank])

    def _publish_counts(self, sends: list[int], receives: list[int]) -> None:
        """Write down what this rank will send to and expects from each rank."""
        turn = (self.step + 1) % 2 * MAX_RANKS
        for start, counts in (
            (SEND_COUNTS + turn, sends),
            (RECV_COUNTS + turn, receives),
        ):
            self.mine.words[start : start + self.size] = memoryview(array("Q", counts))

    def _compare_counts(self) -> None:
        """CollectiveMismatch, on all ranks, when one expects what is not sent."""
        turn, size = self.step % 2 * MAX_RANKS, self.size
        sends, receives = (
            [words[start : start + size].tolist() for words in self.words]
            for start in (SEND_COUNTS + turn, RECV_COUNTS + turn)
        )
        if sends != [list(column) for column in zip(*receives, strict=True)]:
            raise CollectiveMismatch

    def _stages(self, step: int, dtype: torch.dtype, count: int) -> list[Tensor]:
        """The first `count` elements of all ranks' stages of a step."""
        key = (step % 2, dtype, count)
        if key not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = [s.stage(step, dtype)[:count] for s in self.segments]
        return self._views[key]

    def _slices(
        self, step: int, dtype: torch.dtype, count: int
    ) -> list[tuple[Tensor, ...]]:
        """The same, cut into a slice for each rank."""
        key = (step % 2, dtype, count)
        if key not in self._cuts:
            if len(self._cuts) >= MAX_VIEWS:
                self._cuts.clear()
            stages = self._stages(step, dtype, count)
            self._cuts[key] = [stage.tensor_split(self.size) for stage in stages]
        return self._cuts[key]

    def _count(self, sent: int, received: int) -> None:
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
