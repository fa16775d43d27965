"""The gradients of stages, whatever has summed them over the data ranks.

    no wrapper, DDP    whole on every data rank        those of the first one count
    FSDP               a shard on every data rank      all count
    ZeRO 1 and 2       a shard in the optimizer        all count

What several ranks of the rest of the mesh hold alike counts on the first of them.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from xtrain.checkpoint.placement import placement_in
from xtrain.comm.wrapper_rules import check_counted
from xtrain.data_parallel import DistributedDataParallel
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

Held = tuple[Tensor, bool]
"""A gradient, and whether this rank adds it to the norm."""


def unwrapped(stage: PipelineStage) -> nn.Module:
    """What the stage computes, without the wrapper around it."""
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
        is_shard = isinstance(stage.module, FullyShardedDataParallel)
        replicas = getattr(unwrapped(stage), "replicas", None)
        counts = is_shard or replicas is None or replicas.rank() == 0
        if is_shard:
            check_counted(stage.parameters())
        for parameter in stage.parameters():
            if parameter.grad is not None:  # ZeRO has taken it away
                found.append((parameter.grad, counts and places[parameter]))
    return found


def of_zero(
    optimizer: ZeroOptimizer, places: dict[nn.Parameter, bool]
) -> Iterator[Held]:
    """This rank's shards of the gradients that an optimizer of ours has."""
    for parameter, piece in optimizer.gradient_pieces().items():
        yield piece, places[parameter]
