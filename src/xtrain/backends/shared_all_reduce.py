"""All-reduce through the memory of one host, in three ways.

    one shot    write the whole tensor to the stage; step barrier; add up all of them
    two shots   write; step barrier; rank r adds up slice r; step barrier; collect
    in place    two shots on tensors that live in shared memory: nothing is staged

One shot reads N tensors on each of N ranks and waits once, so it is for small tensors.
Two shots read every byte once to reduce it and once to collect it.
"""

import ctypes
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.backends.messages import BLOCK_BYTES
from xtrain.backends.operation import Steps

if TYPE_CHECKING:
    from xtrain.backends.shared_memory import SharedMemory

IN_PLACE_BYTES = 4 << 20  # of a shared tensor at a time: what all have stays cached


def all_reduce_one_shot(
    memory: "SharedMemory", flat: Tensor, op: ReduceOp.RedOpType, check: int
) -> Steps:
    """Every rank writes all of its tensor, then adds up all of them."""
    step, nbytes = memory.step + 1, flat.nbytes
    stages = memory.stages(step, flat.dtype, flat.numel())
    # torch's copy_ takes longer to find out what to do than to do it.
    ctypes.memmove(stages[memory.rank].data_ptr(), flat.data_ptr(), nbytes)
    yield from memory.step_barrier(check)
    memory.reduce_into(flat, stages, op)  # in rank order: all ranks get the same bits
    memory.count(nbytes, (memory.size - 1) * nbytes)


def all_reduce_large(
    memory: "SharedMemory", flat: Tensor, op: ReduceOp.RedOpType, check: int
) -> Steps:
    """In place where all ranks' tensors are shared ones, else in pieces of a stage."""
    location = memory.shared.locate(flat)
    yield from memory.step_barrier(check, location)
    if location and set(memory.sidebands()) == {location}:
        yield from all_reduce_in_place(memory, memory.shared.at(location, flat), op)
        return
    for piece in flat.split(memory.PIECE_BYTES // flat.element_size()):
        yield from all_reduce_two_shot(memory, piece, op)


def all_reduce_two_shot(
    memory: "SharedMemory", piece: Tensor, op: ReduceOp.RedOpType
) -> Steps:
    """Slice r is reduced by rank r, which reads its own share where it is."""
    rank, step, count = memory.rank, memory.step + 1, piece.numel()
    slots = piece.tensor_split(memory.size)
    stages = memory.slices(step, piece.dtype, count)
    for peer in memory.others:
        stages[rank][peer].copy_(slots[peer])
    yield from memory.step_barrier()
    shares = [stage[rank] for stage in stages]
    shares[rank] = slots[rank]
    finished = memory.stages(step + 1, piece.dtype, len(slots[0]))
    memory.reduce_into(finished[rank][: len(shares[0])], shares, op)
    yield from memory.step_barrier()
    for slot, source in zip(slots, finished, strict=True):
        slot.copy_(source[: len(slot)])
    whole, own = piece.nbytes, slots[rank].nbytes
    memory.count(whole, (memory.size - 1) * own + whole - own)


def all_reduce_in_place(
    memory: "SharedMemory", tensors: list[Tensor], op: ReduceOp.RedOpType
) -> Steps:
    """Two shots without a stage: `tensors` are all ranks', in rank order."""
    part = IN_PLACE_BYTES // tensors[0].element_size()
    block = BLOCK_BYTES // tensors[0].element_size()
    for pieces_ in zip(*(tensor.split(part) for tensor in tensors), strict=True):
        slots = [piece.tensor_split(memory.size) for piece in pieces_]
        order = [memory.rank, *memory.others]  # the sum goes into its own
        shares = [slots[peer][memory.rank].split(block) for peer in order]
        for blocks in zip(*shares, strict=True):
            memory.reduce_into(blocks[0], list(blocks), op)
        yield from memory.step_barrier()
        mine = slots[memory.rank]
        for peer in memory.others:
            mine[peer].copy_(slots[peer][peer])
        whole, own = pieces_[0].nbytes, mine[memory.rank].nbytes
        memory.count(own, (memory.size - 1) * own + whole - own)
    yield from memory.step_barrier()  # this rank's tensor is read by no other any more
