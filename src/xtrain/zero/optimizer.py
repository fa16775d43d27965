"""ZeRO 1 and 2: every rank keeps all weights, and the optimizer state of 1/N of them.

    stage 1   backward: full gradients on every rank
              step:     reduce-scatter gradients -> update own shard
                        -> all-gather weights
    stage 2   backward: a bucket's gradients are reduce-scattered as soon as they are
                        complete, and freed
              step:     update own shard -> all-gather weights

Reduce-scatter and all-gather are the two halves of an all-reduce, so a step sends what
plain data parallelism does, 2(N-1)/N of the parameters, and the work of the optimizer
is shared as well. Bytes per parameter with 16-bit weights and Adam: 4 + 12/N in stage
1, 2 + 14/N in stage 2, where plain data parallelism has 16.

The optimizer wraps the bare module's parameters and does all gradient communication
itself: never combine it with DistributedDataParallel.

Muon steps the shards too: with `layout` it knows which matrices they are of, and sends
their pieces to the rank that computes a matrix, and back, as in `muon_ranks`.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models, 2020.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint.files import save_pieces
from xtrain.checkpoint.training_state import Write
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import Collectives, default_collectives
from xtrain.comm.wrapper_rules import check_counted, check_not_slices, claim
from xtrain.zero.buckets import (
    BUCKET_CAP_MB,
    ShardedBucket,
    gather_weights,
    gradient_pieces,
    make_sharded_buckets,
)
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.grad_scaler import Markers
from xtrain.zero.muon_layout import MatrixLayout, layout_of_masters
from xtrain.zero.optimizer_checkpoint import clip_of_module, load_buckets, save_buckets
from xtrain.zero.optimizer_checks import check_state, checked_group, checked_groups
from xtrain.zero.stage1 import ReduceAtStep
from xtrain.zero.stage2 import ReduceInBackward


class ZeroOptimizer(Optimizer):
    """Optimizer-state sharding for the parameters of a bare module.

    It is an optimizer of torch's: learning rate schedules, step hooks, `GradScaler` and
    `step(closure)` work on it. Its `param_groups` and `state` are those of the inner
    optimizer, so an option that is changed there reaches the shards; `params` in them
    are this rank's shards, not the module's parameters (and an empty one for each
    dtype, by which `GradScaler` asks all ranks). Clip with `clip_grad_norm_` here:
    torch's function would see one rank's part.

    A parameter that gets no gradient counts as having one of zero. Buffers are the
    caller's.

    Args:
        params: parameters or groups of them with their own options; rank 0's values are
            copied to all ranks, frozen ones too.
        optimizer_class: what steps the shards, built with `defaults`; it must work
            element by element, as Adam does, or take a `layout`, as Muon does.
        stage: 1 or 2.
        process_group: None for all ranks, or for the replicas of a model on a mesh.
        bucket_cap_mb: MiB of parameters that are reduced and gathered together.
        master_weights: keep fp32 copies of the own shards of fp16 and bf16 parameters.
        offload: keep the shards that are stepped, and so all optimizer state, on the
            CPU.
        gradient_reduction: "average" (as torch does, the default) or "sum" (the default
            of a model on a mesh).
        collectives: TORCH, RING or DIRECT of `xtrain.comm.collective_choice`; what
            suits the backend unless given.
        fp32_gradients: add up the gradients of 16-bit parameters in fp32, here and over
            the ranks; see `xtrain.comm.main_grad`. On unless False.
        layout: of Muon, `matrix_layout(module)`: which matrices the shards are of.
        device: "meta" for parameters there, by their shapes, as a virtual cluster runs
            them.

    ValueError on every rank if one rank's arguments are wrong or differ, `defaults` and
    options of groups included.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        stage: int = 1,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        master_weights: bool = True,
        offload: bool = False,
        gradient_reduction: str | None = None,
        collectives: Collectives | None = None,
        fp32_gradients: bool | None = None,
        layout: MatrixLayout | None = None,
        device: str | None = None,
        **defaults: Any,
    ):
        self._is_built, self._has_layout = False, layout is not None
        options = {
            "optimizer_class": optimizer_class,
            "stage": stage,
            "bucket_cap_mb": bucket_cap_mb,
            "master_weights": master_weights,
            "offload": offload,
            "collectives": collectives and collectives.name,
            "fp32_gradients": fp32_gradients,
            "layout": self._has_layout,
            "device": device,
            **defaults,
        }
        given = params, process_group, gradient_reduction
        groups, over = checked_groups(*given, options)
        self.stage, self.process_group = stage, over.group
        self.gradient_reduction, self._axes = over.reduction, over.axes
        self.rank, self.size = rank_and_size(over.group)
        self._make_buckets = partial(
            make_sharded_buckets,
            cap_bytes=int(bucket_cap_mb * 2**20),
            master_weights=master_weights,
            offload=offload,
            process_group=over.group,
            fp32_gradients=fp32_gradients,
        )
        made = [self._make_buckets(group) for group in groups]
        self.buckets: list[ShardedBucket] = list(chain.from_iterable(made))
        self._collectives = collectives or default_collectives(
            over.group, self.buckets[0].flat.device
        )
        reduction = ReduceAtStep if stage == 1 else ReduceInBackward
        self._reduction = reduction(
            over.group, self._collectives, over.reduction == "average"
        )
        self._markers = Markers(self.buckets, self.reduce_gradients, over.group)
        shard_groups = [of_shards(*pair) for pair in zip(groups, made, strict=True)]
        if layout is not None:
            defaults["layout"] = layout_of_masters(layout, self.buckets, self.rank)
        self.optimizer = optimizer_class(shard_groups, **defaults)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self._is_built = True
        self._take_over(self.buckets)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard and step more parameters, as `torch.optim.Optimizer` does.

        Call it on every rank, between `step` and the next backward.
        """
        if not self._is_built:  # torch's __init__, with groups that are shards already
            super().add_param_group(param_group)
            return
        if self._has_layout:
            raise ValueError("with a layout, all groups are given when it is built")
        known = [p for bucket in self.buckets for p in bucket.parameters]
        group = checked_group(
            param_group, known, self.process_group, self.gradient_reduction
        )
        buckets = self._make_buckets(group)
        self.optimizer.add_param_group(of_shards(group, buckets))
        self.buckets += buckets
        self._take_over(buckets)

    def _take_over(self, buckets: list[ShardedBucket]) -> None:
        """From here on the gradients of these parameters are reduced here."""
        parameters = [p for b in buckets for p in b.parameters]
        claim(parameters, "ZeroOptimizer", self.gradient_pieces, self._axes)
        self._share_with_inner()
        self._reduction.take_over(buckets)

    def _share_with_inner(self) -> None:
        """One list of groups and one state for both, and the markers in the first."""
        inner = self.optimizer
        self.param_groups, self.state = inner.param_groups, inner.state
        self.param_groups[0]["params"] += self._markers.add()
        self._markers.set()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is not reduced yet, update the own shards, gather the weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        self._markers.clear()  # they have nothing to step
        self.optimizer.step()
        self._markers.set()
        self._reduction.begin_step()
        self._gather_weights()
        return loss

    def _gather_weights(self) -> None:
        gather_weights(self.buckets, self._collectives, self.process_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; the module's own `zero_grad` leaves the shards'.

        They are set to None in any case: zeros would take the memory that was freed.
        """
        self._reduction.forget()
        self._markers.set()

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backwards add up gradients on each rank and send nothing.

        The first backward outside reduces the sums, or `reduce_gradients`. In stage 2
        whole gradients stay until then, so it takes the memory of stage 1. In stage 1
        nothing changes: it reduces once a step in any case.
        """
        return self._reduction.no_sync()

    def reduce_gradients(self) -> None:
        """Have every rank's own shard of the gradients in `bucket.master.grad`.

        `step` and `clip_grad_norm_` call it. Stage 2 reduces here what `no_sync` has
        left; RuntimeError if there are other full gradients. Every rank reduces every
        bucket, whichever of its parameters took part there.
        """
        self._reduction.reduce_gradients()

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's shards of the reduced gradients, for `LossScaler.unscale`."""
        self.reduce_gradients()
        return [b.master.grad for b in self.buckets if b.master.grad is not None]

    def gradient_pieces(self) -> dict[nn.Parameter, Tensor]:
        """By parameter, this rank's flat piece of its reduced gradient; some are empty.

        They are views of what is stepped: to sum a gradient over another axis of a
        mesh, sum these.
        """
        self.reduce_gradients()
        return gradient_pieces(self.buckets, self.rank)

    def clip_grad_norm_(
        self, max_norm: float, module: nn.Module | None = None
    ) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        Returns the norm before clipping. `module`, whose parameters these are, must be
        given if it is cut over other ranks too: the norm then is that of the full one,
        with what several ranks hold alike counted once.
        """
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        if module is None:
            check_not_slices(parameters)
            group = self.process_group
            return clip_sharded_grad_norm_(self.gradients, max_norm, group)
        check_counted(parameters)
        self.reduce_gradients()
        return clip_of_module(self.buckets, module, max_norm, self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's shards, and those masters that are copies.

        Only the same rank of as many ranks can load it: `save_sharded` writes what any
        number of them can. The weights are in the module's own `state_dict`.
        """
        masters = [b.master.detach() for b in self.buckets if b.owns_copy]
        shard = {"rank": self.rank, "size": self.size, "masters": masters}
        return {**super().state_dict(), "shard": shard}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on this rank; every rank must call it.

        Weights that have masters become those. ValueError on every rank, and nothing
        changed, if one has another's.
        """
        check_state(state_dict, self.param_groups, self.buckets, self.process_group)
        super().load_state_dict(state_dict)
        self.optimizer.__setstate__(
            {"state": self.state, "param_groups": self.param_groups}
        )
        self._share_with_inner()
        copies = [b for b in self.buckets if b.owns_copy]
        for bucket, saved in zip(copies, state_dict["shard"]["masters"], strict=True):
            bucket.master.copy_(saved)
        self._gather_weights()

    def save_sharded(
        self,
        directory: str | Path,
        step: int,
        module: nn.Module,
        extra: dict[str, Any] | None = None,
        write: Write = save_pieces,
    ) -> Path:
        """Write a checkpoint, every rank its pieces; see `xtrain.checkpoint`.

        `module` is what the parameters belong to; its names, buffers and frozen
        parameters are saved with them. Weights are saved from their masters. Any stage
        and world size can load it.
        """
        group = self.process_group
        what = module, self.buckets, self.optimizer, extra, group
        return save_buckets(directory, step, *what, write)

    @torch.no_grad()
    def load_sharded(
        self, path: str | Path, module: nn.Module
    ) -> tuple[int, dict[str, Any] | None]:
        """Read a checkpoint of any stage and world size, or a run's latest.

        Returns its step and extra. CheckpointError on every rank if it does not fit,
        CheckpointReplaced if it vanished meanwhile and another load may work.
        """
        group = self.process_group
        result = load_buckets(path, module, self.buckets, self.optimizer, group)
        self._gather_weights()
        return result

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroOptimizer belongs to its process group and its module's parameters, "
            "so it cannot be pickled or copied: keep its state_dict(), or save_sharded"
        )


def of_shards(group: dict[str, Any], buckets: list[ShardedBucket]) -> dict[str, Any]:
    """A group of parameters with the masters of their shards instead."""
    return {**group, "params": [bucket.master for bucket in buckets]}
