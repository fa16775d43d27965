"""A step of Muon on ranks: the gradients to be read, the matrices, the updates.

    reduce     ZeRO-1 only: parts of gradients -> the rank that reads them
    gather     momentum'ed gradients, in pieces -> the owner of the matrix
    scatter    the owner's update, in pieces    -> all ranks that hold them

Of what several ranks hold alike one copy of the gradient is read, so its momentum is on
that rank alone: under DDP and ZeRO-1 on the owner of the matrix.

Bytes that all N ranks together send in a step, of matrices of P elements, which travel
in the dtype of Newton-Schulz, 2 bytes for bfloat16:

    DDP        there nothing                        back 2 (N-1) P
    ZeRO-1     there (N-1) P gradients, summed      back 2 (N-1) P
    FSDP       there 2 (what owners do not hold)    back the same; at most 2 (N-1)/N P
    inside ZeroOptimizer as FSDP, beside what that sends

Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.checkpoint.boxes import Box, overlap
from xtrain.checkpoint.pieces import Shard
from xtrain.comm.agreement import (
    check_same,
    global_ranks,
    is_alone,
    place_in,
    problem_of,
    values_of_all,
)
from xtrain.comm.collective_choice import DIRECT, Collectives, default_collectives
from xtrain.comm.main_grad import LOW, accumulate_in_fp32, leave_gradient, unround
from xtrain.comm.wrapper_rules import claim
from xtrain.zero.muon_checks import check_all, options_of
from xtrain.zero.muon_exchange import exchange
from xtrain.zero.muon_layout import MatrixLayout
from xtrain.zero.muon_routes import Held, Round, Route, Stack, deal


class DealtMatrices:
    """The chosen parameters of a layout, dealt out; and what travels in a step.

    ValueError on every rank if one rank's arguments are wrong or differ.

    Args:
        groups: those that Muon steps, in one order on all ranks; frozen ones stay.
        dtype: of the messages, that of Newton-Schulz.
        bucket_cap_mb: MiB of matrices that travel together.
        collectives: whose all-to-all.
    """

    def __init__(
        self,
        layout: MatrixLayout,
        groups: list[dict[str, Any]],
        dtype: torch.dtype,
        bucket_cap_mb: float,
        collectives: Collectives | None = None,
    ):
        given = [p for group in groups for p in group["params"]]
        parameters = [p for p in given if p.requires_grad]
        self.group, self._over = layout.group, layout.over
        self.rank, self.size = place_in(layout.group)
        known = layout.stepped
        problem = problem_of(
            lambda: check_all(groups, known, layout.over, bucket_cap_mb)
        )
        self.stepped = {p: known[p] for p in parameters} if problem is None else {}
        held = [shard for shards in self.stepped.values() for shard in shards]
        self.shards = {shard.name: shard for shard in held}
        options = options_of(groups) | {"ns_dtype": dtype}
        options |= {"matrices": list(self.shards)}
        options |= {"bucket_cap_mb": bucket_cap_mb}
        options |= {"collectives": collectives and collectives.name}
        options |= {"gradient_reduction": layout.over and layout.over.reduction}
        check_same("matrices", [], self.group, options, problem)
        if layout.over is not None:
            claim(parameters, "Muon", axes=layout.over.axes)
            copy_from_rank_0(given, layout.over.group)
            accumulate_in_fp32(parameters)
        mine = {name: self._held(shard) for name, shard in self.shards.items()}
        everyone = values_of_all(mine, self.group)
        elements = bucket_cap_mb * 2**20 / dtype.itemsize
        self.owners, self.rounds = deal(everyone, self.rank, elements)
        reads = [r for turn in self.rounds for r in turn.gather]
        self.read = {r.stack.name for r in reads if r.source == self.rank}
        """The parameters of which this rank reads the gradient, and has momentum."""
        device = parameters[0].device
        self._like = torch.empty(0, dtype=dtype, device=device)
        if collectives is None and not is_alone(self.group):
            collectives = default_collectives(self.group, device)
        self._collectives = collectives or DIRECT
        self._is_reduced = False

    def cut(self, parameter: Tensor, data: Tensor) -> dict[str, Tensor]:
        """Data of a parameter's shape, as that of each of its shards, by name."""
        shards, flat = self.stepped[parameter], data.flatten()
        sizes = [shard.tensor.numel() for shard in shards]
        parts = flat[: sum(sizes)].split(sizes)
        return {
            shard.name: part.view(shard.tensor.shape)
            for shard, part in zip(shards, parts, strict=True)
        }

    def _held(self, shard: Shard) -> Held:
        boxes = tuple(piece.box for piece in shard.pieces())
        if self._over is None:
            return Held(tuple(shard.shape), boxes)
        everyone = global_ranks(self.group)
        members = global_ranks(self._over.group)
        return Held(tuple(shard.shape), boxes, tuple(map(everyone.index, members)))

    def reduce_gradients(self) -> None:
        """Leave the sums in `grad` where they are read, and None on other ranks.

        Once a step, after its last backward; it does nothing under a wrapper.
        """
        if self._over is None or self._is_reduced:
            return
        self._is_reduced = True
        wide = torch.float32
        for shard in self.shards.values():
            wide = torch.promote_types(wide, shard.tensor.dtype)
        totals = {
            name: torch.zeros_like(self.shards[name].tensor, dtype=wide)
            for name in self.read
        }
        like = self._like.to(wide)
        for turn in self.rounds:
            for route, part in self._send(turn.reduce, self._gradient_part, like):
                self._view(route, totals[route.stack.name]).add_(part)
        for name, shard in self.shards.items():
            shard.tensor.grad = None
            if name in totals:
                if self._over.reduction == "average":
                    totals[name].div_(place_in(self._over.group)[1])
                low = shard.tensor.dtype in LOW
                dtype = torch.float32 if low else shard.tensor.dtype
                leave_gradient(shard.tensor, totals[name].to(dtype))

    def _gradient_part(self, route: Route) -> Tensor:
        grad = unround(self.shards[route.stack.name].tensor)
        if grad is None:
            return self._like.new_zeros(()).expand(route.box.size)
        return self._view(route, grad)

    def gather(
        self, turn: Round, directions: Mapping[str, Tensor]
    ) -> dict[Stack, Tensor]:
        """The whole matrices of a round that this rank owns, of pieces on all ranks."""
        whole: dict[Stack, Tensor] = {}
        for route, piece in self._send(
            turn.gather, lambda r: self._view(r, directions[r.stack.name]), self._like
        ):
            stack = route.stack
            if stack not in whole:
                whole[stack] = self._like.new_empty(stack.box.size)
            whole[stack][route.box.slices_in(stack.box)] = piece
        return whole

    def scatter(
        self, turn: Round, whole: Mapping[Stack, Tensor]
    ) -> Iterator[tuple[Stack, Tensor, Tensor]]:
        """Of what owners have: the stack, a view of the parameter, its piece."""
        for route, piece in self._send(
            turn.scatter,
            lambda r: whole[r.stack][r.box.slices_in(r.stack.box)],
            self._like,
        ):
            parameter = self.shards[route.stack.name].tensor
            yield route.stack, self._view(route, parameter), piece

    def end_step(self) -> None:
        """What is reduced from now on belongs to another step."""
        self._is_reduced = False

    def _view(self, route: Route, data: Tensor) -> Tensor:
        """A route's box in data of the shape of this rank's shard."""
        return view_of(self.shards[route.stack.name], data, route.box)

    def _send(
        self, routes: list[Route], read: Callable[[Route], Tensor], like: Tensor
    ) -> Iterator[tuple[Route, Tensor]]:
        return exchange(routes, read, like, self._collectives, self.group)


def copy_from_rank_0(parameters: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Have the values of the group's first rank on all of them."""
    if not is_alone(group):
        for parameter in parameters:
            dist.broadcast(parameter.detach(), group=group, group_src=0)


def view_of(shard: Shard, data: Tensor, box: Box) -> Tensor:
    """A box of a full parameter as a view of `data`, which has the shard's shape."""
    for piece in shard.pieces(data):
        if overlap(piece.box, box) == box:
            return piece.data[box.slices_in(piece.box)]
    raise ValueError(f"{shard.name}: {box} is not in this rank's shard")
