"""What a collective does to the tensors of all ranks, once all have called it.

A rank's part of a call is a `Part`: the flat tensors that it gives and takes. The rank
that comes last computes the results of all; tensors on "meta" have none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.cluster.messages import move_bytes
from xtrain.comm.reduce_op import reduce_into


@dataclass(slots=True)
class Part:
    """What one rank gives to a collective and takes from it, as flat tensors.

    Attributes:
        kind: one of the seven functions below, by name.
        op: how tensors are reduced, where they are.
        root: whose tensor is broadcast, or who gets the reduced one.
    """

    kind: str
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    op: Any = None
    root: int = 0

    @property
    def nbytes(self) -> int:
        """Of the whole tensor that is reduced, gathered or scattered."""
        if self.kind == "all_gather":
            return sum(tensor.nbytes for tensor in self.outputs)
        return sum(tensor.nbytes for tensor in self.inputs)


def all_reduce(parts: Sequence[Part]) -> None:
    total = torch.empty_like(parts[0].inputs[0])
    reduce_into(total, [part.inputs[0] for part in parts], parts[0].op)
    for part in parts:
        move_bytes(part.outputs[0], total)


def broadcast(parts: Sequence[Part]) -> None:
    source = parts[parts[0].root].inputs[0]
    for part in parts:
        if part.outputs[0] is not source:
            move_bytes(part.outputs[0], source)


def reduce(parts: Sequence[Part]) -> None:
    target = parts[parts[0].root].outputs[0]
    total = torch.empty_like(target)
    reduce_into(total, [part.inputs[0] for part in parts], parts[0].op)
    move_bytes(target, total)


def all_gather(parts: Sequence[Part]) -> None:
    if len(parts[0].outputs) == 1 < len(parts):  # one tensor for all pieces
        whole = torch.cat([part.inputs[0] for part in parts])
        for part in parts:
            move_bytes(part.outputs[0], whole)
        return
    pieces = [part.inputs[0].clone() for part in parts]  # an output may be an input
    for part in parts:
        for output, piece in zip(part.outputs, pieces, strict=True):
            move_bytes(output, piece)


def reduce_scatter(parts: Sequence[Part]) -> None:
    size = len(parts)
    if len(parts[0].inputs) == 1 < size:
        whole = torch.empty_like(parts[0].inputs[0])
        reduce_into(whole, [part.inputs[0] for part in parts], parts[0].op)
        pieces: Sequence[Tensor] = whole.view(size, -1).unbind()
    else:
        pieces = [torch.empty_like(tensor) for tensor in parts[0].inputs]
        for number, piece in enumerate(pieces):
            shares = [part.inputs[number] for part in parts]
            reduce_into(piece, shares, parts[0].op)
    for part, piece in zip(parts, pieces, strict=True):
        move_bytes(part.outputs[0], piece)


def all_to_all(parts: Sequence[Part]) -> None:
    sent = [list(part.inputs) for part in parts]
    for rank, part in enumerate(parts):
        for source, output in enumerate(part.outputs):
            if sent[source][rank].numel() != output.numel():
                raise ValueError(
                    f"group rank {source} sends {sent[source][rank].numel()} elements "
                    f"to group rank {rank}, which expects {output.numel()}"
                )
    for rank, part in enumerate(parts):
        for source, output in enumerate(part.outputs):
            move_bytes(output, sent[source][rank])


def barrier(parts: Sequence[Part]) -> None:
    """No bytes, but all ranks have come."""


MOVES: dict[str, Callable[[Sequence[Part]], None]] = {
    "all_reduce": all_reduce, "broadcast": broadcast, "reduce": reduce,
    "all_gather": all_gather, "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all, "barrier": barrier,
}  # fmt: skip


class Moves:
    """The transport of `backends.torch_calls`: says what is to be moved."""

    def all_reduce(self, flat: Tensor, op: ReduceOp.RedOpType, check: int) -> Part:
        return Part("all_reduce", [flat], [flat], op)

    def broadcast(self, flat: Tensor, root: int, check: int) -> Part:
        return Part("broadcast", [flat], [flat], root=root)

    def reduce(
        self, flat: Tensor, root: int, op: ReduceOp.RedOpType, check: int
    ) -> Part:
        return Part("reduce", [flat], [flat], op, root)

    def all_gather(self, outputs: list[Tensor], own: Tensor, check: int) -> Part:
        return Part("all_gather", outputs, [own])

    def reduce_scatter(
        self, output: Tensor, inputs: list[Tensor], op: ReduceOp.RedOpType, check: int
    ) -> Part:
        return Part("reduce_scatter", [output], inputs, op)

    def all_to_all(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Part:
        return Part("all_to_all", outputs, inputs)

    def barrier(self, check: int) -> Part:
        return Part("barrier", [], [])
