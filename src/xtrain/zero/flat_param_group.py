"""Parameters of one unit, flat and sharded: gather them, use them, free them.

    at rest       shard (1/N of the group)           full buffer empty
    forward       all-gather -> modules compute with views of the full buffer
                  -> freed
    backward      all-gather again -> full gradients -> reduce-scatter -> freed

The full buffer keeps its identity while its memory comes and goes: autograd saved the
views, and finds the weights in them again when they have been gathered a second time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import Collectives
from xtrain.comm.deferred import BackwardAlwaysRuns
from xtrain.comm.main_grad import (
    LOW,
    accumulate_in_fp32,
    add_to_gradient,
    gradient_dtype,
)
from xtrain.comm.work import Work
from xtrain.zero.flat import FlatLayout
from xtrain.zero.grad_scaler import shard_gradient
from xtrain.zero.hybrid import Replicas

Owner = tuple[nn.Module, str]  # a module and the name of its parameter
FullGradients = tuple[Tensor | None, ...]  # whole ones, None for what took no part


class FlatParamGroup:
    """Parameters of a unit in one flat tensor: of one dtype, all trainable or frozen.

    Args:
        parameters: distinct parameters, with every module and name that each has.
        names: their names in the whole model.
        compute_dtype: of the gathered weights; the shard's own unless given.
        average: divide summed gradients by the number of ranks, replicas included.
        fp32_gradients: reduce in fp32. None: yes if the shards have 16 bits; False: in
            what backward computes them in.
        device: of the shards; the parameters' own unless given.
        replicas: the ranks that hold the same shard, over which its gradient is summed.
    """

    def __init__(
        self,
        parameters: dict[nn.Parameter, list[Owner]],
        names: dict[nn.Parameter, str],
        group: ProcessGroup | None,
        compute_dtype: torch.dtype | None,
        collectives: Collectives,
        average: bool,
        fp32_gradients: bool | None = None,
        device: torch.device | None = None,
        replicas: Replicas | None = None,
    ):
        originals = list(parameters)
        first = originals[0]
        self.names = [names[p] for p in originals]
        self.owners = list(parameters.values())
        self.group, self.replicas = group, replicas
        self.rank, self.size = rank_and_size(group)
        copies = 1 if replicas is None else replicas.size
        self._divisor = self.size * copies if average else 1
        self.layout = FlatLayout([p.shape for p in originals], self.size)
        self.trainable = first.requires_grad
        low = compute_dtype if first.is_floating_point() else None
        self.compute_dtype = low or first.dtype
        device = device or first.device
        self.collectives = collectives
        self.shard = self._make_shard(originals, device)
        pieces = self.layout.pieces(self.shard, self.rank)
        self.local_shards = list(map(become_shard, originals, pieces))
        for local, owners in zip(self.local_shards, self.owners, strict=True):
            for module, name in owners:
                module._parameters[name] = local

        self.full = torch.empty(
            self.layout.padded_numel, dtype=self.compute_dtype, device=device
        )
        accumulate_in_fp32(self.local_shards, fp32_gradients)
        in_fp32 = self.shard.dtype in LOW and fp32_gradients is not False
        self.reduce_dtype = self.compute_dtype
        if in_fp32 or (fp32_gradients and self.compute_dtype in LOW):
            self.reduce_dtype = torch.float32
        self._nbytes = self.full.untyped_storage().nbytes()
        self.full.untyped_storage().resize_(0)
        self._gathering: Work | None = None
        self._sent: Tensor | None = None  # input of the all-gather under way
        self.is_full = False
        self.full_grad: Tensor | None = None  # whole gradients, not reduced yet
        self.copy_grad: Tensor | None = None  # of the shard, not summed over replicas
        # Unshard needs an input that asks for a gradient; it gets none.
        self.grad_anchor = torch.zeros(0, device=device, requires_grad=True)

    def _make_shard(
        self, originals: list[nn.Parameter], device: torch.device
    ) -> Tensor:
        """This rank's part of rank 0's values; zeros for the meta device's."""
        first, layout = originals[0], self.layout
        if first.is_meta:  # no rank has the weights yet: they are loaded later
            return torch.zeros(layout.shard_numel, dtype=first.dtype, device=device)
        flat = first.detach().new_zeros(layout.padded_numel)
        for view, original in zip(layout.views(flat), originals, strict=True):
            view.copy_(original.detach())
        torch.distributed.broadcast(flat, group=self.group, group_src=0)
        shard = layout.shard(flat, self.rank).clone()
        if self.replicas is not None:  # of the first copy
            torch.distributed.broadcast(shard, group=self.replicas.group, group_src=0)
        return shard

    def unshard(self) -> None:
        """Issue the all-gather of the weights, unless it has been."""
        if self.is_full or self._gathering is not None:
            return
        self.full.untyped_storage().resize_(self._nbytes)
        self._sent = self.shard.to(self.compute_dtype)
        self._gathering = self.collectives.all_gather(
            self.full.data, self._sent, group=self.group
        )

    def wait_for_unshard(self) -> None:
        """Have the weights in the full buffer."""
        self.unshard()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = self._sent = None
            self.is_full = True

    def reshard(self) -> None:
        """Give the full weights' memory back; the shard stays."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = self._sent = None
        self.full.untyped_storage().resize_(0)
        self.is_full = False

    def use_full_parameters(
        self, on_gradients: Callable[[FullGradients], None]
    ) -> None:
        """Let modules compute with views of the full buffer.

        `on_gradients` gets their gradients in backward, once all are there.
        """
        # .data: refilling the buffer must not look like a change of what autograd saved
        views = self.layout.views(self.full.data)
        if self.trainable and torch.is_grad_enabled():
            views = list(Unshard.apply(self.grad_anchor, on_gradients, *views))
        for view, owners in zip(views, self.owners, strict=True):
            for module, name in owners:
                module.__dict__[name] = view  # found before module._parameters

    def use_shards(self) -> None:
        """Let the local shards be the parameters again."""
        for owners in self.owners:
            for module, name in owners:
                module.__dict__.pop(name, None)

    def add_full_gradients(self, gradients: FullGradients) -> None:
        """Add whole gradients to those that wait to be reduced; what is None is zero.

        One backward's keep the compute dtype. Sums of several are in the shard's, at
        least in fp32: they may wait for long.
        """
        first = self.full_grad is None
        if self.full_grad is None:
            self.full_grad = torch.empty_like(self.full)
            self.full_grad[self.layout.numel :].zero_()
        else:
            dtype = torch.promote_types(self.shard.dtype, torch.float32)
            self.full_grad = self.full_grad.to(dtype)
        views = self.layout.views(self.full_grad)
        for view, gradient in zip(views, gradients, strict=True):
            if first:
                view.zero_() if gradient is None else view.copy_(gradient)
            elif gradient is not None:
                view.add_(gradient)

    def start_reduce(self) -> Work:
        """Issue the reduce-scatter of the whole gradients, and free them here.

        When that is over, the sum over replicas is issued, which has its own `wait`.
        """
        assert self.full_grad is not None
        flat, self.full_grad = self.full_grad.to(self.reduce_dtype), None
        reduced = torch.empty_like(flat[: self.layout.shard_numel])
        work = self.collectives.reduce_scatter(reduced, flat, group=self.group)
        finish = partial(self.add_reduced_gradients, reduced)
        if self.replicas is not None:
            finish = partial(self.keep_for_replicas, reduced)
        return Work([work], finish, keep=flat)

    def keep_for_replicas(self, reduced: Tensor) -> None:
        """Add the shard's gradient of this copy to what the sum over replicas takes."""
        if self.copy_grad is not None:
            dtype = torch.promote_types(self.shard.dtype, torch.float32)
            reduced = self.copy_grad.to(dtype).add_(reduced)
        self.copy_grad = reduced
        self.start_replica_sum()

    def start_replica_sum(self) -> None:
        """Issue the sum over replicas of what was kept, unless that is deferred."""
        if self.replicas is None or self.replicas.deferring or self.copy_grad is None:
            return
        total, self.copy_grad = self.copy_grad.to(self.reduce_dtype), None
        self.replicas.begin_sum(total, partial(self.add_reduced_gradients, total))

    def add_reduced_gradients(self, reduced: Tensor) -> None:
        """Add a summed gradient shard to the local shards' `grad`."""
        reduced = reduced.to(gradient_dtype(self.local_shards[0]))
        if self._divisor > 1:
            reduced.div_(self._divisor)
        parts = self.layout.pieces(reduced, self.rank)
        for local, part in zip(self.local_shards, parts, strict=True):
            add_to_gradient(local, part, partial(shard_gradient, group=self.group))


def become_shard(original: nn.Parameter, piece: Tensor) -> nn.Parameter:
    """The parameter itself, with its local piece: optimizers made before train that."""
    if original.is_meta:
        return nn.Parameter(piece, requires_grad=original.requires_grad)
    original.data, original.grad = piece, None
    return original


class Unshard(BackwardAlwaysRuns):
    """The gathered weights in autograd's graph; backward hands on their gradients.

    Forward: sharded -> replicated. Backward: partial -> sharded. A backward without
    any gradient frees the weights, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        on_gradients: Callable[[FullGradients], None],
        *views: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.on_gradients = on_gradients
        ctx.set_materialize_grads(False)  # no zeros for what took no part
        return tuple(view.data for view in views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.on_gradients(gradients)
        return (None, None, *[None] * len(gradients))
