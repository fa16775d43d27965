"""Collectives of the ranks of one host through memory they all see.

Every rank owns a segment that all others map. A collective is: write into your own
segment, wait until all have, read from theirs. No message is sent, and nothing is
copied more often than these two steps ask for.

    segment of a rank
      words       arrived: how many steps this rank has completed; the fingerprint of
                  its call; how far its channels are written and read
      text        the description of its call, should the ranks disagree
      stage 0, 1  its share of a step, in turns: one step can be written while slow
                  readers still finish the one before
      channels    a ring of bytes to each peer, for point-to-point messages

Small all-reduces are one step: everybody writes its tensor, then adds up everybody's.
Large ones go in pieces that fit the stage, each in two steps: everybody writes its
piece; rank r adds up slice r of all; everybody collects the finished slices. Every byte
is read once to be reduced and once to be collected, however many ranks there are.

The segments are anonymous memory (memfd), reached through the owner's /proc entry: the
kernel lets in the same user only, and when the last process is gone so is the memory.
"""

import mmap
import os
import platform
import threading
from array import array

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.liveness import Peers
from xtrain.backends.meeting import Disagreement, forget, host_key, meet, wait_until
from xtrain.backends.messages import MAX_MESSAGE_BYTES, Inbox
from xtrain.backends.progress import Steps
from xtrain.comm.reduce_op import combine, finish

MAX_RANKS = 64
STAGE_BYTES = 1 << 20  # two of these stay in a core's cache
CHANNEL_BYTES = 1 << 20
ONE_SHOT_BYTES = 256 << 10  # up to here one step beats two

# Words of a segment, by index; the channels' counters follow.
ARRIVED = 0
LEFT = 1
DESCRIBED = 2
JOINED = 3
PRINT = 4
ROUNDS = 6
WRITTEN = 64
READ = 64 + MAX_RANKS
# Of an all-to-all, two steps.
GIVES = 64 + 2 * MAX_RANKS
TAKES = 64 + 4 * MAX_RANKS
TEXT_OFFSET = 4096
TEXT_BYTES = 4096
STAGE_OFFSET = TEXT_OFFSET + TEXT_BYTES
CHANNEL_OFFSET = STAGE_OFFSET + 2 * STAGE_BYTES


class Segment:
    """One rank's memory, seen from any rank."""

    def __init__(self, descriptor: int, size: int):
        length = length_for(size)
        self.map = mmap.mmap(descriptor, length)
        self.bytes = memoryview(self.map)
        self.words = self.bytes[:TEXT_OFFSET].cast("Q")
        everything = torch.frombuffer(self.map, dtype=torch.uint8)
        stages = everything[STAGE_OFFSET:CHANNEL_OFFSET]
        self._stages = stages.view(2, STAGE_BYTES)
        self._typed: dict[tuple[int, torch.dtype], Tensor] = {}

    def stage(self, step: int, dtype: torch.dtype) -> Tensor:
        """The stage of a step as a flat tensor of `dtype`."""
        key = (step % 2, dtype)
        if key not in self._typed:
            self._typed[key] = self._stages[step % 2].view(dtype)
        return self._typed[key]

    def channel(self, peer: int) -> memoryview:
        start = CHANNEL_OFFSET + peer * CHANNEL_BYTES
        return self.bytes[start : start + CHANNEL_BYTES]


class Channel:
    """A ring of bytes from one rank to another: counters of bytes written and read."""

    def __init__(self, owner: Segment, source: int, reader: Segment, target: int):
        self._ring = owner.channel(target)
        self._written, self._read = owner.words, reader.words
        self._w, self._r = WRITTEN + target, READ + source

    def write(self, data: memoryview) -> int:
        written, read = self._written[self._w], self._read[self._r]
        start = written % CHANNEL_BYTES
        room = CHANNEL_BYTES - (written - read)
        count = min(data.nbytes, room, CHANNEL_BYTES - start)
        if count:
            self._ring[start : start + count] = data[:count]
            fence()
            self._written[self._w] = written + count
        return count

    def read(self, into: memoryview) -> int:
        written, read = self._written[self._w], self._read[self._r]
        start = read % CHANNEL_BYTES
        count = min(into.nbytes, written - read, CHANNEL_BYTES - start)
        if count:
            fence()
            into[:count] = self._ring[start : start + count]
            fence()
            self._read[self._r] = read + count
        return count


class SharedMemory:
    """The transport of one group; see the module's text.

    Args:
        store: where the ranks tell each other their process and segment.
        peers: watches the other ranks' processes.

    `sent` and `received` count the bytes of tensors that collectives wrote into this
    rank's stage and read from the others' stages.
    """

    PATIENCE = 0.0  # a rank that died in a call has left all it will ever leave

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
        descriptor = os.memfd_create("xtrain", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, length_for(size))
            self.mine = Segment(descriptor, size)
            self.segments = self._map_all(store, timeout, peers, descriptor)
        except BaseException:
            self.mine.words[LEFT] = 1  # for those who have mapped it already
            raise
        finally:
            os.close(descriptor)  # everyone has mapped it
        self.words = [segment.words for segment in self.segments]
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
        entries, group = meet(store, "shm", rank, size, str(descriptor), timeout, peers)
        segments = []
        for peer, entry in enumerate(entries):
            if entry.host != host_key():
                raise RuntimeError(
                    f"xtrain-shm: rank {peer} runs on another host than rank {rank}; "
                    'shared memory serves one host, use "xtrain-socket" across hosts'
                )
            if peer == rank:
                segments.append(self.mine)
            else:
                segments.append(open_segment(peer, entry.pid, entry.address, size))
        # A segment is believed once it shows the group's number and its owner's rank:
        # then its owner has read the same lines, and mapped every segment.
        number = int.from_bytes(group[:7], "little") << 6
        self.mine.words[JOINED] = number + rank

        def unknown() -> list[int]:
            words = enumerate(segment.words[JOINED] for segment in segments)
            return [peer for peer, word in words if word != number + peer]

        wait_until(
            lambda: not unknown(), peers, timeout,
            lambda: f"ranks {unknown()} did not map the memory of this group",
        )  # fmt: skip
        forget(store, "shm", rank)
        return segments

    # -- one step ---------------------------------------------------------------------

    def arrive(self, check: int = 0, rounds: int = 0) -> Steps:
        """Complete a step: return when all ranks have.

        Args:
            check: fingerprint of the call; all ranks' must be equal.
            rounds: kept for `most_rounds` of this step.
        """
        self.step += 1
        step, words = self.step, self.mine.words
        words[PRINT + step % 2] = check
        words[ROUNDS + step % 2] = rounds
        fence()  # what was staged is visible before the arrival is
        words[ARRIVED] = step
        for peer in self.others:
            peer_words = self.words[peer]
            while peer_words[ARRIVED] < step:
                yield
        fence()
        if check:
            for peer in self.others:
                if self.words[peer][PRINT + step % 2] != check:
                    raise Disagreement

    def most_rounds(self) -> int:
        return max(words[ROUNDS + self.step % 2] for words in self.words)

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
        yield from self.arrive(check)

    def all_reduce(self, flat: Tensor, op: ReduceOp.RedOpType, check: int) -> Steps:
        if flat.numel() * flat.element_size() <= ONE_SHOT_BYTES:
            yield from self._all_reduce_at_once(flat, op, check)
            return
        for piece in flat.split(STAGE_BYTES // flat.element_size()):
            yield from self._all_reduce_piece(piece, op, check)
            check = 0

    def _all_reduce_at_once(
        self, flat: Tensor, op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        step, count = self.step + 1, flat.numel()
        self.mine.stage(step, flat.dtype)[:count].copy_(flat)
        yield from self.arrive(check)
        shares = [s.stage(step, flat.dtype)[:count] for s in self.segments]
        reduce_into(flat, shares, op)  # in rank order: all ranks get the same bits
        self._count(nbytes_of(flat), (self.size - 1) * nbytes_of(flat))

    def _all_reduce_piece(
        self, piece: Tensor, op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        step, count = self.step + 1, piece.numel()
        self.mine.stage(step, piece.dtype)[:count].copy_(piece)
        yield from self.arrive(check)
        slices = [
            s.stage(step, piece.dtype)[:count].tensor_split(self.size)[self.rank]
            for s in self.segments
        ]
        finished = self.mine.stage(step + 1, piece.dtype)[: slices[0].numel()]
        reduce_into(finished, slices, op)
        yield from self.arrive()
        slots = piece.tensor_split(self.size)
        for slot, segment in zip(slots, self.segments, strict=True):
            slot.copy_(segment.stage(step + 1, piece.dtype)[: slot.numel()])
        own, whole = nbytes_of(finished), nbytes_of(piece)
        self._count(whole + own, (self.size - 1) * own + whole - own)

    def broadcast(self, flat: Tensor, root: int, check: int) -> Steps:
        for piece in pieces(flat, STAGE_BYTES):
            stage = self.segments[root].stage(self.step + 1, flat.dtype)[
                : piece.numel()
            ]
            if self.rank == root:
                stage.copy_(piece)
                self._count(nbytes_of(piece), 0)
            yield from self.arrive(check)
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
            yield from self.arrive(check)
            check = 0
            if self.rank == root:
                shares = [s.stage(step, flat.dtype)[:count] for s in self.segments]
                reduce_into(piece, shares, op)
                self._count(0, (self.size - 1) * nbytes_of(piece))

    def reduce_scatter(
        self, output: Tensor, inputs: list[Tensor], op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        part = STAGE_BYTES // self.size // 8 * 8 // output.element_size()
        for start in range(0, max(1, *(t.numel() for t in inputs)), part):
            step = self.step + 1
            stage = self.mine.stage(step, output.dtype)
            for peer, source in enumerate(inputs):
                piece = source[start : start + part]
                stage[peer * part : peer * part + piece.numel()].copy_(piece)
                self._count(nbytes_of(piece), 0)
            yield from self.arrive(check)
            check = 0
            target, place = output[start : start + part], self.rank * part
            shares = [
                s.stage(step, output.dtype)[place : place + target.numel()]
                for s in self.segments
            ]
            reduce_into(target, shares, op)
            self._count(0, (self.size - 1) * nbytes_of(target))

    def all_gather(self, outputs: list[Tensor], input: Tensor, check: int) -> Steps:
        part = STAGE_BYTES // input.element_size()
        for start in range(0, max(1, *(t.numel() for t in outputs)), part):
            step = self.step + 1
            piece = input[start : start + part]
            self.mine.stage(step, input.dtype)[: piece.numel()].copy_(piece)
            yield from self.arrive(check)
            check = 0
            for output, segment in zip(outputs, self.segments, strict=True):
                target = output[start : start + part]
                target.copy_(segment.stage(step, input.dtype)[: target.numel()])
            everything = sum(nbytes_of(t[start : start + part]) for t in outputs)
            self._count(nbytes_of(piece), everything - nbytes_of(piece))

    def all_to_all(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Steps:
        """Pieces of any sizes; a piece that a rank does not send or expect is empty."""
        dtype, itemsize = inputs[0].dtype, inputs[0].element_size()
        part = STAGE_BYTES // self.size // 8 * 8 // itemsize
        self._announce([t.numel() for t in inputs], [t.numel() for t in outputs])
        longest = max(t.numel() for t in (*inputs, *outputs))
        mine, done, rounds = -(-longest // part), 0, 1
        while done < rounds:
            step, start = self.step + 1, done * part
            stage = self.mine.stage(step, dtype)
            for peer, source in enumerate(inputs):
                piece = source[start : start + part]
                stage[peer * part : peer * part + piece.numel()].copy_(piece)
                self._count(nbytes_of(piece) if peer != self.rank else 0, 0)
            yield from self.arrive(check, mine)
            if done == 0:
                self._compare_announced()
            check, done = 0, done + 1
            rounds = max(rounds, self.most_rounds())
            place = self.rank * part
            for peer, output in enumerate(outputs):
                target = output[start : start + part]
                source = self.segments[peer].stage(step, dtype)
                target.copy_(source[place : place + target.numel()])
                self._count(0, nbytes_of(target) if peer != self.rank else 0)

    def _announce(self, gives: list[int], takes: list[int]) -> None:
        """Write down what this rank will send to and expects from each rank."""
        turn = (self.step + 1) % 2 * MAX_RANKS
        for place, counts in ((GIVES + turn, gives), (TAKES + turn, takes)):
            self.mine.words[place : place + self.size] = memoryview(array("Q", counts))

    def _compare_announced(self) -> None:
        """Raise Disagreement, on all ranks, when somebody expects what is not sent."""
        turn, size = self.step % 2 * MAX_RANKS, self.size
        gives, takes = (
            [words[place : place + size].tolist() for words in self.words]
            for place in (GIVES + turn, TAKES + turn)
        )
        if gives != [list(column) for column in zip(*takes, strict=True)]:
            raise Disagreement

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
        self.segments.clear()
        del self.mine


def reduce_into(output: Tensor, shares: list[Tensor], op: ReduceOp.RedOpType) -> None:
    """Reduce the shares in rank order into `output`; fp16 and bf16 add up in fp32."""
    if len(shares) == 1:
        output.copy_(shares[0])
    elif output.dtype in (torch.float16, torch.bfloat16):
        total = shares[0].float()
        for share in shares[1:]:
            combine(total, share.float(), op)
        finish(total, op, len(shares))
        output.copy_(total)
        return
    else:
        output.copy_(shares[0])
        for share in shares[1:]:
            combine(output, share, op)
    finish(output, op, len(shares))


def pieces(flat: Tensor, nbytes: int) -> list[Tensor]:
    """Cut a tensor into pieces of at most `nbytes`; an empty one stays one piece."""
    return list(flat.split(max(1, nbytes // flat.element_size())))


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def length_for(size: int) -> int:
    """Bytes of a segment; memory that is never touched costs nothing."""
    return CHANNEL_OFFSET + size * CHANNEL_BYTES


def open_segment(peer: int, pid: int, descriptor: str, size: int) -> Segment:
    """Map a peer's segment: anonymous memory of the right size made by this user."""
    opened = os.open(f"/proc/{pid}/fd/{int(descriptor)}", os.O_RDWR | os.O_CLOEXEC)
    try:
        name, status = os.readlink(f"/proc/self/fd/{opened}"), os.fstat(opened)
        if (
            not name.startswith("/memfd:xtrain ")
            or status.st_uid != os.geteuid()
            or status.st_size != length_for(size)
        ):
            raise RuntimeError(
                f"xtrain-shm: what the store holds for rank {peer} leads to {name} "
                f"of user {status.st_uid}, {status.st_size} bytes: no segment of ours"
            )
        return Segment(opened, size)
    finally:
        os.close(opened)


_KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64")
_lock = threading.Lock()


def fence() -> None:
    """Have stores before it seen before stores after it.

    x86 keeps their order by itself; elsewhere taking a lock makes the processor do it.
    """
    if not _KEEPS_ORDER:
        with _lock:
            pass
