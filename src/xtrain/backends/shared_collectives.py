"""The other collectives through the memory of one host, in pieces that fit the stage.

Each step: write a piece to this rank's stage, wait at the step barrier, read from the
stages of the others. The first barrier of a call carries its fingerprint, `check`.
"""

from array import array
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.backends.calls import CollectiveMismatch
from xtrain.backends.operation import Steps
from xtrain.backends.segments import MAX_RANKS, RECV_COUNTS, SEND_COUNTS, STAGE_BYTES
from xtrain.comm.reduce_op import reduce_into

if TYPE_CHECKING:
    from xtrain.backends.shared_memory import SharedMemory


def broadcast(memory: "SharedMemory", flat: Tensor, root: int, check: int) -> Steps:
    for piece in pieces(flat):
        stage = memory.segments[root].stage(memory.step + 1, flat.dtype)
        stage = stage[: piece.numel()]
        if memory.rank == root:
            stage.copy_(piece)
            memory.count(piece.nbytes, 0)
        yield from memory.step_barrier(check)
        check = 0
        if memory.rank != root:
            piece.copy_(stage)
            memory.count(0, piece.nbytes)


def reduce(
    memory: "SharedMemory", flat: Tensor, root: int, op: ReduceOp.RedOpType, check: int
) -> Steps:
    for piece in pieces(flat):
        step, count = memory.step + 1, piece.numel()
        memory.mine.stage(step, flat.dtype)[:count].copy_(piece)
        memory.count(piece.nbytes, 0)
        yield from memory.step_barrier(check)
        check = 0
        if memory.rank == root:
            shares = [s.stage(step, flat.dtype)[:count] for s in memory.segments]
            reduce_into(piece, shares, op)
            memory.count(0, (memory.size - 1) * piece.nbytes)


def reduce_scatter(
    memory: "SharedMemory",
    output: Tensor,
    inputs: list[Tensor],
    op: ReduceOp.RedOpType,
    check: int,
) -> Steps:
    part = STAGE_BYTES // memory.size // 8 * 8 // output.element_size()
    own = inputs[memory.rank]
    if own.data_ptr() == output.data_ptr():  # in place: it is read once more
        own = own.clone()
    for start in range(0, max(1, *(t.numel() for t in inputs)), part):
        step = memory.step + 1
        stage = memory.mine.stage(step, output.dtype)
        for peer in memory.others:
            piece = inputs[peer][start : start + part]
            stage[peer * part : peer * part + piece.numel()].copy_(piece)
            memory.count(piece.nbytes, 0)
        yield from memory.step_barrier(check)
        check = 0
        target, offset = output[start : start + part], memory.rank * part
        shares = [
            s.stage(step, output.dtype)[offset : offset + target.numel()]
            for s in memory.segments
        ]
        shares[memory.rank] = own[start : start + part]
        reduce_into(target, shares, op)
        memory.count(0, (memory.size - 1) * target.nbytes)


def all_gather(
    memory: "SharedMemory", outputs: list[Tensor], input: Tensor, check: int
) -> Steps:
    part = STAGE_BYTES // input.element_size()
    for start in range(0, max(1, *(t.numel() for t in outputs)), part):
        step = memory.step + 1
        piece = input[start : start + part]
        memory.mine.stage(step, input.dtype)[: piece.numel()].copy_(piece)
        yield from memory.step_barrier(check)
        check = 0
        memory.count(piece.nbytes, 0)
        for peer in memory.others:
            target = outputs[peer][start : start + part]
            stage = memory.segments[peer].stage(step, input.dtype)
            target.copy_(stage[: target.numel()])
            memory.count(0, target.nbytes)
    outputs[memory.rank].copy_(input)


def all_to_all(
    memory: "SharedMemory", outputs: list[Tensor], inputs: list[Tensor], check: int
) -> Steps:
    """Pieces of any sizes; a piece that a rank does not send or expect is empty."""
    dtype, itemsize = inputs[0].dtype, inputs[0].element_size()
    part = STAGE_BYTES // memory.size // 8 * 8 // itemsize
    publish_counts(memory, [t.numel() for t in inputs], [t.numel() for t in outputs])
    longest = max(t.numel() for t in (*inputs, *outputs))
    mine, done, rounds = -(-longest // part), 0, 1
    while done < rounds:
        step, start = memory.step + 1, done * part
        stage = memory.mine.stage(step, dtype)
        for peer in memory.others:
            piece = inputs[peer][start : start + part]
            stage[peer * part : peer * part + piece.numel()].copy_(piece)
            memory.count(piece.nbytes, 0)
        yield from memory.step_barrier(check, mine)
        if done == 0:
            compare_counts(memory)
        check, done = 0, done + 1
        rounds = max(rounds, *memory.sidebands())
        offset = memory.rank * part
        for peer in memory.others:
            target = outputs[peer][start : start + part]
            source = memory.segments[peer].stage(step, dtype)
            target.copy_(source[offset : offset + target.numel()])
            memory.count(0, target.nbytes)
    outputs[memory.rank].copy_(inputs[memory.rank])


def publish_counts(
    memory: "SharedMemory", sends: list[int], receives: list[int]
) -> None:
    """Write down what this rank will send to and expects from each rank."""
    turn = (memory.step + 1) % 2 * MAX_RANKS
    for start, counts in (
        (SEND_COUNTS + turn, sends),
        (RECV_COUNTS + turn, receives),
    ):
        memory.mine.words[start : start + memory.size] = memoryview(array("Q", counts))


def compare_counts(memory: "SharedMemory") -> None:
    """CollectiveMismatch, on all ranks, when one expects what is not sent."""
    turn, size = memory.step % 2 * MAX_RANKS, memory.size
    sends, receives = (
        [words[start : start + size].tolist() for words in memory.words]
        for start in (SEND_COUNTS + turn, RECV_COUNTS + turn)
    )
    if sends != [list(column) for column in zip(*receives, strict=True)]:
        raise CollectiveMismatch


def pieces(flat: Tensor) -> list[Tensor]:
    """Cut a tensor into pieces that fit a stage; an empty one stays one piece."""
    return list(flat.split(STAGE_BYTES // flat.element_size()))
