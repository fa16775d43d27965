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

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models, 2020.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.comm.agreement import (
    check_bare,
    check_filled,
    check_options,
    check_same,
    claim,
    problem_of,
    raise_everywhere,
    raising_everywhere,
)
from xtrain.comm.checks import message_device, rank_and_size
from xtrain.comm.collective_choice import Collectives, default_collectives
from xtrain.comm.work import Work
from xtrain.zero import resume
from xtrain.zero.buckets import BUCKET_CAP_MB, Bucket, as_groups, split_parameters
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.grad_scaler import mark, marker


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
            element by element, as Adam does.
        stage: 1 or 2.
        bucket_cap_mb: MiB of parameters that are reduced and gathered together.
        master_weights: keep fp32 copies of the own shards of fp16 and bf16 parameters.
        offload: keep the shards that are stepped, and so all optimizer state, on the
            CPU.
        gradient_reduction: "average" (as torch does) or "sum".
        collectives: TORCH, RING or DIRECT; what suits the backend unless given, see
            `xtrain.comm.collective_choice`.

    All ranks must give the same, `defaults` and options of groups included.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        stage: int = 1,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        master_weights: bool = True,
        offload: bool = False,
        gradient_reduction: str = "average",
        collectives: Collectives | None = None,
        **defaults: Any,
    ):
        self._is_built = False
        self.stage, self.process_group = stage, process_group
        self.rank, self.size = rank_and_size(process_group)
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._markers: dict[tuple[torch.dtype, torch.device], nn.Parameter] = {}
        groups: list[dict[str, Any]] = []
        problem = problem_of(
            lambda: check_stage(stage),
            lambda: check_options(gradient_reduction, bucket_cap_mb),
            lambda: groups.extend(as_groups(params)),
            lambda: self._check_parameters(groups),
            lambda: check_trainable(groups),
        )
        options = {
            "optimizer_class": optimizer_class,
            "stage": stage,
            "bucket_cap_mb": bucket_cap_mb,
            "master_weights": master_weights,
            "offload": offload,
            "gradient_reduction": gradient_reduction,
            "collectives": collectives and collectives.name,
            **defaults,
        }
        self._check_same(groups, options, problem)
        self._average = gradient_reduction == "average"
        self._cap_bytes = int(bucket_cap_mb * 2**20)
        self._master_weights, self._offload = master_weights, offload
        self._next = 0
        self._in_backward = False
        self._is_reduced = False  # stage 1: since the last step
        self._in_flight: list[tuple[Bucket, Work, Tensor]] = []
        shard_groups = [self._shard(group) for group in groups]
        device = self.buckets[0].flat.device
        self._collectives = collectives or default_collectives(process_group, device)
        self.optimizer = optimizer_class(shard_groups, **defaults)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self._is_built = True
        self._share_with_inner()
        self._take_over(list(self._bucket_of))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard and step more parameters, as `torch.optim.Optimizer` does.

        Call it on every rank, between `step` and the next backward.
        """
        if not self._is_built:  # torch's __init__, with groups that are shards already
            super().add_param_group(param_group)
            return
        groups: list[dict[str, Any]] = []
        problem = problem_of(
            lambda: groups.extend(as_groups([param_group])),
            lambda: self._check_parameters(groups),
        )
        self._check_same(groups, {}, problem)
        self.optimizer.add_param_group(self._shard(groups[0]))
        self._share_with_inner()
        self._take_over([p for p in groups[0]["params"] if p.requires_grad])

    def _shard(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group's parameters in buckets; the group with their masters instead."""
        everything = group["params"]
        trainable = [p for p in everything if p.requires_grad]
        for parameter in everything:
            if not parameter.requires_grad:
                dist.broadcast(
                    parameter.detach(), group=self.process_group, group_src=0
                )
        device = torch.device("cpu") if self._offload else None
        masters = []
        for members in split_parameters(trainable, self._cap_bytes):
            low = members[0].dtype in (torch.float16, torch.bfloat16)
            dtype = torch.float32 if low and self._master_weights else None
            bucket = Bucket(members, self.rank, self.size, dtype, device)
            dist.broadcast(bucket.flat, group=self.process_group, group_src=0)
            bucket.master.data.copy_(bucket.shard)
            self.buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(members, bucket))
            masters.append(bucket.master)
        # Backward reaches the last parameters first, so buckets leave from the end.
        self._order = self.buckets[::-1]
        return {**group, "params": masters}

    def _take_over(self, parameters: list[Tensor]) -> None:
        """From here on the gradients of these parameters are reduced here."""
        claim(parameters, "ZeroOptimizer")
        if self.stage == 2:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def _share_with_inner(self) -> None:
        """One list of groups and one state for both, and the markers in the first."""
        inner = self.optimizer
        self.param_groups, self.state = inner.param_groups, inner.state
        for bucket in self.buckets:
            if bucket.kind not in self._markers:
                self._markers[bucket.kind] = marker(*bucket.kind)
                self.param_groups[0]["params"].append(self._markers[bucket.kind])
        self._mark()

    def _mark(self) -> None:
        for kind, parameter in self._markers.items():
            mark(parameter, partial(self._unscale, kind))

    @torch.no_grad()
    def _unscale(
        self,
        kind: tuple[torch.dtype, torch.device],
        found_inf: Tensor,
        inverse_scale: Tensor,
    ) -> None:
        """What GradScaler does to the gradients of one kind, for all ranks together."""
        self.reduce_gradients()
        masters = [b.master for b in self.buckets if b.kind == kind]
        gradients = [m.grad for m in masters if m.grad is not None]
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, found_inf, inverse_scale
            )
        anywhere = found_inf.to(message_device(self.process_group))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.process_group)
        found_inf.copy_(anywhere)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is not reduced yet, update the own shards, gather the weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for parameter in self._markers.values():
            parameter.grad = None  # they have nothing to step
        self.optimizer.step()
        self._mark()
        self._is_reduced = False
        self._gather_weights()
        return loss

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

        ValueError on every rank, and nothing changed, if one has another's. Weights
        that have masters become those.
        """
        problem = problem_of(lambda: self._check_state(state_dict))
        raise_everywhere(ValueError, problem, self.process_group)
        super().load_state_dict(state_dict)
        self.optimizer.__setstate__(
            {"state": self.state, "param_groups": self.param_groups}
        )
        self._share_with_inner()
        copies = [b for b in self.buckets if b.owns_copy]
        for bucket, saved in zip(copies, state_dict["shard"]["masters"], strict=True):
            bucket.master.copy_(saved)
        self._gather_weights()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroOptimizer belongs to its process group and its module's parameters, "
            "so it cannot be pickled or copied: keep its state_dict(), or save_sharded"
        )

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's shards of the reduced gradients, for `LossScaler.unscale`."""
        self.reduce_gradients()
        return [b.master.grad for b in self.buckets if b.master.grad is not None]

    def _gather_weights(self) -> None:
        works = []
        for bucket in self.buckets:
            if bucket.owns_copy:
                bucket.shard.copy_(bucket.master)
            works.append(
                self._collectives.all_gather(
                    bucket.flat, bucket.shard, group=self.process_group
                )
            )
        for work in works:
            work.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; the module's own `zero_grad` leaves the shards'.

        They are set to None in any case: zeros would take the memory that was freed.
        """
        self._is_reduced = False
        for bucket in self.buckets:
            bucket.full_grad = bucket.master.grad = None
            for parameter in bucket.parameters:
                parameter.grad = None
        self._mark()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Have every rank's own shard of the gradients in `bucket.master.grad`.

        `step` and `clip_grad_norm_` call it; stage 2 has nothing left to do here, and
        RuntimeError if there are full gradients all the same. Every rank reduces every
        bucket, whichever of its parameters took part there.
        """
        if self.stage == 2 and self._has_gradients():
            kept = sum(parameter.grad is not None for parameter in self._bucket_of)
            raise RuntimeError(
                f"{kept} parameters have a whole gradient again: stage 2 reduced and "
                "freed it in backward. Is another data parallelism around the module?"
            )
        if self.stage == 2 or (self._is_reduced and not self._has_gradients()):
            return
        self._is_reduced = True
        for bucket in self._order:
            for parameter in bucket.parameters:
                bucket.take(parameter)
            self._reduce(bucket)
            self._collect(1)
        self._collect(0)

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._bucket_of)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        Returns the norm before clipping.
        """
        return clip_sharded_grad_norm_(self.gradients, max_norm, self.process_group)

    def save_sharded(
        self,
        directory: str | Path,
        step: int,
        module: nn.Module,
        extra: dict[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint, every rank its pieces; see `xtrain.zero.checkpoint`.

        `module` is what the parameters belong to; its names, buffers and frozen
        parameters are saved with them. Weights are saved from their masters. Any stage
        and world size can load it.
        """
        with raising_everywhere(ValueError, group=self.process_group):
            places, whole = self._places(module), self._whole(module)
        states = {
            piece: {
                key: layout.pieces(value, self.rank)[number] if is_cut else value
                for key, value in self.optimizer.state.get(bucket.master, {}).items()
                for is_cut in [value.shape == bucket.master.shape and value.dim() == 1]
            }
            for bucket in self.buckets
            for layout in [bucket.layout]
            for number, piece in enumerate(self._pieces[bucket])
        }
        group = self.process_group
        return resume.save(
            directory, step, places, whole, states, self.optimizer, extra, group
        )

    def load_sharded(
        self, path: str | Path, module: nn.Module
    ) -> tuple[int, dict[str, Any] | None]:
        """Read a checkpoint of any stage and world size, or a run's latest.

        Returns its step and extra. CheckpointError on every rank if it does not fit,
        CheckpointReplaced if it vanished meanwhile and another load may work.
        """
        with raising_everywhere(ValueError, group=self.process_group):
            places, whole = self._places(module), self._whole(module)
        made: resume.States = {}

        def make_states(saved: resume.Saved) -> resume.States:
            for bucket in self.buckets:
                self._make_state(bucket, saved, places, made)
            return made

        group = self.process_group
        result = resume.load(path, places, whole, make_states, self.optimizer, group)
        self._take_numbers(made)
        with torch.no_grad():
            self._gather_weights()
        return result

    # -- what all ranks must give alike

    def _check_parameters(self, groups: list[dict[str, Any]]) -> None:
        parameters = [p for group in groups for p in group["params"]]
        for parameter in parameters:
            if not isinstance(parameter, Tensor) or not parameter.is_leaf:
                raise ValueError(f"{parameter!r} is not a parameter")
        everything = [*parameters, *self._bucket_of]
        if len(set(everything)) < len(everything):
            raise ValueError("a parameter is in the groups twice")
        check_bare(parameters, "ZeroOptimizer")
        check_filled(numbered(parameters))

    def _check_same(
        self,
        groups: list[dict[str, Any]],
        options: dict[str, object],
        problem: str | None,
    ) -> None:
        of_groups = {
            f"{key} of group {number}": value
            for number, group in enumerate(groups)
            for key, value in group.items()
            if key != "params"
        }
        parameters = numbered([p for group in groups for p in group["params"]])
        options = {**options, **of_groups}
        check_same("parameters", parameters, self.process_group, options, problem)

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        shard = state_dict.get("shard", {})
        found = shard.get("rank"), shard.get("size")
        if found != (self.rank, self.size):
            raise ValueError(
                f"a state_dict of rank {found[0]} of {found[1]} ranks; this is rank "
                f"{self.rank} of {self.size}"
            )
        theirs = [list(master.shape) for master in shard["masters"]]
        mine = [list(b.master.shape) for b in self.buckets if b.owns_copy]
        if theirs != mine:
            raise ValueError(f"masters of shapes {theirs} in it, {mine} here")
        saved, held = (
            [len(group["params"]) for group in groups]
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        if saved != held:
            raise ValueError(f"groups of {saved} shards in it, of {held} here")

    # -- pieces of checkpoints

    def _places(self, module: nn.Module) -> dict[Tensor, resume.Place]:
        """Every local piece with the name, shape and first element of its parameter."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        missing = sum(parameter not in names for parameter in self._bucket_of)
        if missing:
            raise ValueError(f"{missing} parameters of the optimizer are not of module")
        places: dict[Tensor, resume.Place] = {}
        self._pieces: dict[Bucket, list[Tensor]] = {}
        for bucket in self.buckets:
            layout = bucket.layout
            pieces = layout.pieces(bucket.master.detach(), self.rank)
            self._pieces[bucket] = pieces
            for piece, slot, parameter in zip(
                pieces, layout.slots, bucket.parameters, strict=True
            ):
                start, _ = layout.piece_bounds(slot, self.rank)
                places[piece] = (names[parameter], tuple(slot.shape), start)
        return places

    def _whole(self, module: nn.Module) -> dict[str, Tensor]:
        others = {
            n: p for n, p in module.named_parameters() if p not in self._bucket_of
        }
        return {**others, **resume.persistent_buffers(module)}

    def _make_state(
        self,
        bucket: Bucket,
        saved: resume.Saved,
        places: dict[Tensor, resume.Place],
        made: resume.States,
    ) -> None:
        """State for a bucket, cut into its pieces' in `made`; zero where none is."""
        pieces = self._pieces[bucket]
        kinds: dict[str, resume.Kind] = {}
        for piece in pieces:
            kinds |= saved.get(places[piece][0], {})
        on_device = resume.wants_numbers_on_device(self.optimizer)
        state = resume.empty_state(bucket.master, kinds, on_device)
        self.optimizer.state[bucket.master] = state
        for number, piece in enumerate(pieces):
            made[piece] = {
                key: bucket.layout.pieces(state[key], self.rank)[number]
                if kinds[key].cut
                else state[key].clone()
                for key in saved.get(places[piece][0], {})
            }
        if not state:
            del self.optimizer.state[bucket.master]

    def _take_numbers(self, made: resume.States) -> None:
        """A bucket steps as one: it has the largest of its parameters' step counts."""
        for bucket, pieces in self._pieces.items():
            for key, value in self.optimizer.state.get(bucket.master, {}).items():
                if value.dim() == 0:
                    found = [made[p][key] for p in pieces if key in made[p]]
                    value.copy_(torch.stack(found).max())

    # -- hooks of stage 2, and what both stages do with a bucket

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._finish)
        with torch.no_grad():
            self._bucket_of[parameter].take(parameter)
            self._send_complete()

    def _send_complete(self) -> None:
        while self._next < len(self._order) and not self._order[self._next].waiting:
            self._reduce(self._order[self._next])
            self._next += 1
            self._collect(1)  # one on its way, so at most two full buckets live

    def _finish(self) -> None:
        """The end of backward: what got no gradient counts as zero."""
        self._in_backward = False
        with torch.no_grad():
            for bucket in self._order[self._next :]:
                for parameter in list(bucket.waiting):
                    bucket.take(parameter)
            self._send_complete()
            self._collect(0)
        self._next = 0
        for bucket in self.buckets:
            bucket.waiting = set(bucket.parameters)

    def _reduce(self, bucket: Bucket) -> None:
        shard = torch.empty_like(bucket.shard)
        work = self._collectives.reduce_scatter(
            shard, bucket.full_grad, group=self.process_group
        )
        self._in_flight.append((bucket, work, shard))

    def _collect(self, leave: int) -> None:
        """Wait for reductions but the last `leave`, and free the full gradients."""
        while len(self._in_flight) > leave:
            bucket, work, shard = self._in_flight.pop(0)
            work.wait()
            bucket.full_grad = None
            master = bucket.master
            reduced = shard.to(dtype=master.dtype, device=master.device)
            if self._average:
                reduced.div_(self.size)
            if master.grad is None:
                master.grad = reduced
            else:
                master.grad.add_(reduced)


def check_stage(stage: int) -> None:
    if stage not in (1, 2):
        raise ValueError(f"stage={stage}: ZeroOptimizer knows stages 1 and 2")


def check_trainable(groups: list[dict[str, Any]]) -> None:
    if not any(p.requires_grad for group in groups for p in group["params"]):
        raise ValueError("no parameter requires a gradient")


def numbered(parameters: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"parameter {number}", p) for number, p in enumerate(parameters)]
