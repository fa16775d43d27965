"""Gradients and biases of a model in stages: clipped and updated over all ranks.

Where the gradients are depends on what has summed them over the data ranks:

    no wrapper, DDP    whole on every data rank        those of the first one count
    FSDP               a shard on every data rank      all count; of several copies,
                                                       those of the first
    ZeRO 1 and 2       a shard in the optimizer        all count

Of equal copies on other axes of the mesh the first counts.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from xtrain.checkpoint.parameter_slice import placement_in
from xtrain.comm.wrapper_rules import check_counted
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model.balance import update_biases
from xtrain.model.stages import DecoderStage
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer
from xtrain.zero.clip import clip_sharded_grad_norm_

Held = tuple[Tensor, bool]
"""A gradient, and whether this rank adds it to the norm."""


def unwrapped(stage: PipelineStage) -> nn.Module:
    """The module of the stage without its wrapper."""
    module = stage.module
    if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
        return module.module
    return module


def gradients_of(stages: Sequence[PipelineStage]) -> list[Held]:
    """This rank's gradients of all its stages."""
    found: list[Held] = []
    places: dict[nn.Parameter, bool] = {}
    for stage in stages:
        module = unwrapped(stage)
        for name, parameter in module.named_parameters():
            places[parameter] = placement_in(module, name).is_first
    optimizers = [s.reduction for s in stages if isinstance(s.reduction, ZeroOptimizer)]
    for optimizer in dict.fromkeys(optimizers):
        found += of_zero(optimizer, places)
    for optimizer in dict.fromkeys(optimizers):
        check_counted(p for b in optimizer.buckets for p in b.parameters)
    for stage in stages:
        if isinstance(stage.module, FullyShardedDataParallel):
            check_counted(stage.parameters())
            counts = stage.module.is_first_copy
        else:
            replicas = getattr(unwrapped(stage), "replicas", None)
            counts = replicas is None or replicas.rank() == 0
        for parameter in stage.parameters():
            if parameter.grad is not None:  # ZeRO has taken it away
                found.append((parameter.grad, counts and places[parameter]))
    return found


def of_zero(
    optimizer: ZeroOptimizer, places: dict[nn.Parameter, bool]
) -> Iterator[Held]:
    """This rank's shards of the gradients that a ZeroOptimizer holds."""
    for parameter, piece in optimizer.gradient_pieces().items():
        yield piece, places[parameter]


def stage_modules(stages: Sequence[PipelineStage]) -> list[DecoderStage]:
    """Their modules without wrappers; ValueError for those of another model."""
    modules = [unwrapped(stage) for stage in stages]
    for stage, module in zip(stages, modules, strict=True):
        if not isinstance(module, DecoderStage):
            raise ValueError(
                f"stage {stage.index} is a {type(module).__name__}: give the stages "
                "that XtrainModel.stages has made"
            )
    return modules  # type: ignore[return-value]


def update_stages_balance_biases(
    stages: Sequence[PipelineStage], rate: float = 1e-3
) -> None:
    """`XtrainModel.update_balance_biases` of a model in stages.

    Every rank of the mesh calls it with its stages; the loads are those of all of them,
    mirrored stages included.
    """
    update_biases(stage_modules(stages), rate)


def clip_stages_grad_norm_(stages: Sequence[PipelineStage], max_norm: float) -> Tensor:
    """Scale the gradients of all stages to a norm of at most `max_norm`.

    Every rank of the mesh calls it with its stages, after the gradients are summed,
    bare or under DDP, FSDP or a `ZeroOptimizer`. Returns what the norm was: that of the
    full model, in which tied and mirrored parameters, and what several tensor or data
    ranks hold alike, count once.
    """
    modules, held = stage_modules(stages), gradients_of(stages)
    gradients, counts = [g for g, _ in held], [count for _, count in held]
    return clip_sharded_grad_norm_(gradients, max_norm, modules[0].all_ranks(), counts)
