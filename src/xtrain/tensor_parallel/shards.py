"""From full weights to a rank's shard, and the same start for any number of ranks.

A shard is always cut from the full weight, drawn or loaded: so the model is the same
for every number of ranks, shards differ between ranks, and the initialisation uses the
full layer's fan-in.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import check_divides
from xtrain.comm.checks import rank_and_size, shape_of


def cut(full: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Slice `index` of `count` along `dim`, in memory of its own."""
    check_divides(f"dim {dim} of a weight {list(full.shape)}", full.shape[dim], count)
    part = full.shape[dim] // count
    return full.detach().narrow(dim, index * part, part).clone()


def shard(full: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """This rank's slice of `full`, in memory of its own."""
    rank, size = rank_and_size(group)
    return cut(full, dim, rank, size)


def share(what: str, length: int, group: ProcessGroup | None) -> int:
    """How much of `length` a rank holds; ValueError unless it divides."""
    size = rank_and_size(group)[1]
    check_divides(what, length, size)
    return length // size


def weight_of(full: nn.Module | Tensor) -> Tensor:
    """The full weight: of a module that has one, or the tensor itself."""
    weight = full if isinstance(full, Tensor) else getattr(full, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(
            f"{type(full).__name__} is neither a weight [rows, columns] nor a module "
            "that has one"
        )
    return weight


@torch.no_grad()
def copy_shard(
    parameter: Tensor, full: Tensor, dim: int, group: ProcessGroup | None
) -> None:
    """Fill a parameter with this rank's slice of `full`."""
    parameter.copy_(shard(full, dim, group))


def layer_of(full: nn.Module, name: str) -> nn.Module:
    """`full`'s layer `name`."""
    layer = getattr(full, name, None)
    if layer is None:
        raise ValueError(f"{type(full).__name__} has no {name}")
    return layer


def bare_weight(full: nn.Module, name: str) -> Tensor:
    """The weight of `full`'s layer `name`, which must have no bias."""
    layer = layer_of(full, name)
    if getattr(layer, "bias", None) is not None:
        raise ValueError(f"{name} has a bias, and the block that is cut has none")
    return weight_of(layer)


def placed_as(weight: Tensor) -> dict[str, Any]:
    """The device and dtype of `weight`, as arguments."""
    return {"device": weight.device, "dtype": weight.dtype}


def check_features(layer: str, x: Tensor, features: int) -> None:
    """ValueError unless the last dim of `x` has this many features."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-1] != features:
        raise ValueError(
            f"{layer}: input {shape_of(x)}, expected [..., {features}] with at least "
            "one dim before the features"
        )


def check_ids(ids: Tensor, vocabulary: int, ignored: int | None = None) -> None:
    """ValueError unless all ids, but `ignored`, are within the vocabulary.

    On a GPU that is asserted there, because to look would make the CPU wait for it.
    """
    kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
    if kind not in (torch.int64, torch.int32):
        raise ValueError(f"ids are {kind}, not int64 or int32")
    inside = (ids >= 0) & (ids < vocabulary)
    if ignored is not None:
        inside |= ids == ignored
    if ids.device.type != "cpu":
        torch._assert_async(inside.all())
    elif not bool(inside.all()):
        wrong = ids[~inside].flatten()[:3].tolist()
        raise ValueError(f"ids {wrong} are outside the vocabulary of {vocabulary}")
