"""What `sync_gradients` sums over a mesh axis, whatever has summed over another one.

no wrapper, DDP    the parameter's own gradient, whole
FSDP               the parameter's own gradient, a shard
ZeRO 1 and 2       this rank's piece of it, which the optimizer has
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from xtrain.comm.wrapper_rules import owner_of, pieces_of
from xtrain.model.placement import REPLICA_AXES

SHARDS = ("ZeroOptimizer", "FullyShardedDataParallel")


def gradients_to_sum(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Of each trained parameter, in order; zeros where it has none."""
    trained = [p for p in parameters if p.requires_grad]
    kept = pieces_of(trained)
    found = []
    for parameter in trained:
        gradient = kept.get(parameter, parameter.grad)
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        found.append(gradient)
    return [gradient for gradient in found if gradient.numel()]


def check_skip(parameters: Iterable[Tensor], axis: str, skip: Collection[str]) -> None:
    """ValueError if a wrapper that shards gradients is over the wrong axis.

    The table of who counts in a norm knows of shards over "data" alone, or over
    "expert_data" where there are experts.
    """
    claimed = {owner_of(parameter) for parameter in parameters}
    owners = [owner for owner in SHARDS if owner in claimed]
    if owners and (axis in skip) != (axis in REPLICA_AXES):
        owner, over = " and ".join(owners), "data"
        if axis in ("expert", "expert_data"):
            over = "expert_data"
        raise ValueError(
            f"sync_gradients(skip={tuple(skip)!r}) of parameters under {owner}: it "
            f'shards over "{over}", process_group=mesh["{over}"].get_group(), and then '
            f'skip=("{over}",)'
        )
    if axis == "expert" and axis in skip:
        raise ValueError(
            f'sync_gradients(skip={tuple(skip)!r}): no wrapper sums over "expert", '
            "whose ranks hold different experts; give it process_group="
            'mesh["expert_data"].get_group()'
        )
