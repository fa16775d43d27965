"""One block of a fully sharded model: gather its weights, use them, free them.

    at rest       shard (1/N of the block)           full buffer empty
    forward       all-gather -> views of the full buffer stand in for the parameters
                  -> freed
    backward      all-gather again -> full gradients -> reduce-scatter -> freed

The full buffer keeps its identity while its memory comes and goes: autograd saved the
views, and finds the weights in them again when they have been gathered a second time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import message_device
from xtrain.comm.collective_choice import Collectives, default_collectives
from xtrain.comm.work import Work
from xtrain.zero.flat import FlatLayout

Site = tuple[nn.Module, str]  # a module and the name of its parameter


class Shards:
    """The sharded parameters of a block: of one dtype, all trainable or all frozen.

    Args:
        parameters: distinct parameters of the block, with every place each stands in.
        names: their names in the whole model.
        compute_dtype: of the gathered weights; the shard's own unless given.
    """

    def __init__(
        self,
        parameters: dict[nn.Parameter, list[Site]],
        names: dict[nn.Parameter, str],
        group: ProcessGroup | None,
        rank: int,
        size: int,
        compute_dtype: torch.dtype | None,
        collectives: Collectives | None,
        average: bool,
    ):
        originals = list(parameters)
        first = originals[0]
        self.names = [names[p] for p in originals]
        self.sites = list(parameters.values())
        self.layout = FlatLayout([p.shape for p in originals], size)
        self.trainable = first.requires_grad
        self.group, self.rank, self.size = group, rank, size
        self._average = average
        floating = first.is_floating_point()
        self.compute_dtype = (
            compute_dtype if compute_dtype and floating else first.dtype
        )

        device = message_device(group) if first.is_meta else first.device
        self.collectives = collectives or default_collectives(group, device)
        if first.is_meta:  # nobody has the weights yet: they are loaded later
            self.shard = torch.zeros(
                self.layout.shard_numel, dtype=first.dtype, device=device
            )
        else:
            flat = first.detach().new_zeros(self.layout.padded_numel)
            for view, original in zip(self.layout.views(flat), originals, strict=True):
                view.copy_(original.detach())
            torch.distributed.broadcast(flat, group=group, group_src=0)
            self.shard = self.layout.shard(flat, rank).clone()
        self.pieces = [
            nn.Parameter(piece, requires_grad=self.trainable)
            for piece in self.layout.pieces(self.shard, rank)
        ]
        for piece, sites in zip(self.pieces, self.sites, strict=True):
            for module, name in sites:
                module._parameters[name] = piece

        self.full = torch.empty(
            self.layout.padded_numel, dtype=self.compute_dtype, device=device
        )
        self._nbytes = self.full.untyped_storage().nbytes()
        self.full.untyped_storage().resize_(0)
        self._gathering: Work | None = None
        self._sent: Tensor | None = None  # what an all-gather under way reads
        self.is_full = False
        # What to do with the full gradients of one call, once all are there.
        self.on_gradients: Callable[[int, tuple[Tensor | None, ...]], None]
        # Unshard needs an input that asks for a gradient; it gets none.
        self.anchor = torch.zeros(0, device=device, requires_grad=True)

    def start_gather(self) -> None:
        """Issue the all-gather of the weights, unless it has been."""
        if self.is_full or self._gathering is not None:
            return
        self.full.untyped_storage().resize_(self._nbytes)
        self._sent = self.shard.to(self.compute_dtype)
        self._gathering = self.collectives.all_gather(
            self.full.data, self._sent, group=self.group
        )

    def finish_gather(self) -> None:
        """Have the weights in the full buffer."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = self._sent = None
            self.is_full = True

    def free(self) -> None:
        """Give the full weights' memory back; the shard stays."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = self._sent = None
        self.full.untyped_storage().resize_(0)
        self.is_full = False

    def install(self, call: int = 0) -> None:
        """Let views of the full buffer stand in for the parameters.

        `call` comes back with the gradients: a module may be called more than once.
        """
        # .data: refilling the buffer must not look like a change of what autograd saved
        views = self.layout.views(self.full.data)
        if self.trainable and torch.is_grad_enabled():
            views = list(Unshard.apply(self.anchor, self, call, *views))
        for view, sites in zip(views, self.sites, strict=True):
            for module, name in sites:
                module.__dict__[name] = view  # found before module._parameters

    def uninstall(self) -> None:
        for sites in self.sites:
            for module, name in sites:
                module.__dict__.pop(name, None)

    def start_reduce(self, gradients: tuple[Tensor | None, ...]) -> "Reduction":
        """Issue the reduce-scatter of the full gradients."""
        flat = torch.empty(
            self.layout.padded_numel, dtype=self.compute_dtype, device=self.full.device
        )
        flat[self.layout.numel :].zero_()
        views = self.layout.views(flat)
        for view, gradient in zip(views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        reduced = torch.empty_like(flat[: self.layout.shard_numel])
        work = self.collectives.reduce_scatter(reduced, flat, group=self.group)
        return Reduction(self, work, flat, reduced)

    def add_gradient(self, reduced: Tensor) -> None:
        """Add a reduced gradient shard to the pieces' `grad`."""
        reduced = reduced.to(self.shard.dtype)
        if self._average:
            reduced.div_(self.size)
        for piece, part in zip(
            self.pieces, self.layout.pieces(reduced, self.rank), strict=True
        ):
            if piece.grad is None:
                piece.grad = part
            else:
                piece.grad.add_(part)


class Reduction:
    """A reduce-scatter under way; `full` is the memory it still reads."""

    def __init__(self, shards: Shards, work: Work, full: Tensor, reduced: Tensor):
        self._shards, self._work, self._full = shards, work, full
        self._reduced = reduced

    def finish(self) -> None:
        self._work.wait()
        del self._full
        self._shards.add_gradient(self._reduced)


class Unshard(torch.autograd.Function):
    """The gathered weights in autograd's graph; backward hands on their gradients.

    Forward: sharded -> replicated. Backward: partial -> sharded.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, shards: Shards, call: int, *views: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shards, ctx.call = shards, call
        ctx.set_materialize_grads(False)  # no zeros for what took no part
        return tuple(view.data for view in views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.shards.on_gradients(ctx.call, gradients)
        return (None, None, None, *[None] * len(gradients))
