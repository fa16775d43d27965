"""The `ZeroOptimizer` that `xtrain.zero` exports: the algorithm, checks, checkpoints.

    optimizer.ZeroOptimizer            the algorithm
    checked_optimizer.ZeroOptimizer    arguments compared on all ranks; checkpoints

An algorithm trusts its arguments, so that it can be read and copied alone. Here a wrong
argument of one rank is an error on every rank, before anything is sent.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint.parameter_slice import all_ranks_of, placement_in
from xtrain.comm.agreement import problem_of, raise_everywhere
from xtrain.comm.collective_choice import Collectives, default_collectives
from xtrain.comm.wrapper_mesh import ranks_to_reduce
from xtrain.comm.wrapper_rules import (
    check_counted,
    check_not_slices,
    check_options,
    claim,
)
from xtrain.zero.buckets import BUCKET_CAP_MB, ShardedBucket, as_groups
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.optimizer import ZeroOptimizer as BareZeroOptimizer
from xtrain.zero.optimizer_checkpoint import (
    load_buckets,
    save_buckets,
    shards_of,
)
from xtrain.zero.optimizer_checks import (
    check_parameters,
    check_same_groups,
    check_stage,
    check_state,
    check_trainable,
)


class ZeroOptimizer(BareZeroOptimizer):
    """`optimizer.ZeroOptimizer`, wrong arguments refused on every rank; checkpoints.

    The arguments are those of the algorithm, in `xtrain.zero.optimizer`. Parameters of
    a model on a mesh know its `process_group` and "sum": leave them out.
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
        gradient_reduction: str | None = None,
        collectives: Collectives | None = None,
        fp32_gradients: bool | None = None,
        **defaults: Any,
    ):
        groups: list[dict[str, Any]] = []
        wrong = problem_of(lambda: groups.extend(as_groups(params)))
        held = [p for group in groups for p in group["params"]]
        over = ranks_to_reduce(held, process_group, gradient_reduction)
        process_group, gradient_reduction = over.group, over.reduction
        self._axes = over.axes
        problem = wrong or problem_of(
            lambda: check_stage(stage),
            over.check,
            lambda: check_options(over.reduction, bucket_cap_mb),
            lambda: check_parameters(groups),
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
            "fp32_gradients": fp32_gradients,
            **defaults,
        }
        check_same_groups(groups, options, problem, process_group)
        trained = [p for g in groups for p in g["params"] if p.requires_grad]
        suited = default_collectives(process_group, trained[0].device)
        super().__init__(
            groups,
            optimizer_class,
            stage,
            process_group,
            bucket_cap_mb,
            master_weights,
            offload,
            gradient_reduction,
            collectives or suited,
            fp32_gradients,
            **defaults,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:
            known = [p for bucket in self.buckets for p in bucket.parameters]
            groups: list[dict[str, Any]] = []
            problem = problem_of(
                lambda: groups.extend(as_groups([param_group])),
                lambda: check_parameters(groups, known),
                lambda: ranks_to_reduce(
                    groups[0]["params"], self.process_group, self.gradient_reduction
                ).check(),
            )
            check_same_groups(groups, {}, problem, self.process_group)
            param_group = groups[0]
        super().add_param_group(param_group)

    def _take_over(self, buckets: list[ShardedBucket]) -> None:
        parameters = [p for b in buckets for p in b.parameters]
        claim(parameters, "ZeroOptimizer", self.gradient_pieces, self._axes)
        super()._take_over(buckets)

    def clip_grad_norm_(
        self, max_norm: float, module: nn.Module | None = None
    ) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        Returns the norm before clipping. `module`, whose parameters these are, must be
        given if it is cut over other ranks too: the norm then is that of the full one,
        with what several ranks hold alike counted once.
        """
        if module is None:
            check_not_slices(p for b in self.buckets for p in b.parameters)
            return super().clip_grad_norm_(max_norm)
        check_counted(p for b in self.buckets for p in b.parameters)
        self.reduce_gradients()
        shards = shards_of(self.buckets, module, self.rank, gradients=True)
        gradients = [shard for of_bucket in shards.values() for shard in of_bucket]
        return clip_sharded_grad_norm_(
            [shard.tensor for shard in gradients],
            max_norm,
            all_ranks_of(module, self.process_group),
            [placement_in(module, shard.name).is_first for shard in gradients],
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on this rank; every rank must call it.

        ValueError on every rank, and nothing changed, if one has another's.
        """
        problem = problem_of(
            lambda: check_state(
                state_dict, self.param_groups, self.buckets, self.process_group
            )
        )
        raise_everywhere(ValueError, problem, self.process_group)
        super().load_state_dict(state_dict)

    def save_sharded(
        self,
        directory: str | Path,
        step: int,
        module: nn.Module,
        extra: dict[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint, every rank its pieces; see `xtrain.checkpoint`.

        `module` is what the parameters belong to; its names, buffers and frozen
        parameters are saved with them. Weights are saved from their masters. Any stage
        and world size can load it.
        """
        group = self.process_group
        return save_buckets(
            directory, step, module, self.buckets, self.optimizer, extra, group
        )

    def load_sharded(
        self, path: str | Path, module: nn.Module
    ) -> tuple[int, dict[str, Any] | None]:
        """Read a checkpoint of any stage and world size, or a run's latest.

        Returns its step and extra. CheckpointError on every rank if it does not fit,
        CheckpointReplaced if it vanished meanwhile and another load may work.
        """
        group = self.process_group
        result = load_buckets(path, module, self.buckets, self.optimizer, group)
        with torch.no_grad():
            self._gather_weights()
        return result
