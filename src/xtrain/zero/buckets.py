"""What ZeRO 1 and 2 cut up: buckets of parameters, flat, each rank stepping its shard.

weights    | a        | b  | c     |.|     one flat tensor, padded
shards     | rank 0   | rank 1   | rank 2   |
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import Collectives
from xtrain.comm.main_grad import accumulate_in_fp32, gradient_dtype
from xtrain.zero.flat import FlatLayout

BUCKET_CAP_MB = 8.0  # small enough that the C library keeps a bucket's memory at hand


class ShardedBucket:
    """Some parameters of one group and dtype: flat weights, flat gradients, own shard.

    The parameters become views of `flat`. `master` is what the optimizer steps: the own
    shard of `flat`, or an fp32 copy of it.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        rank: int,
        size: int,
        master_dtype: torch.dtype | None,
        master_device: torch.device | None,
    ):
        self.parameters = parameters
        self.layout = FlatLayout([p.shape for p in parameters], size)
        first = parameters[0]
        self.flat = torch.zeros(
            self.layout.padded_numel, dtype=first.dtype, device=first.device
        )
        views = self.layout.views(self.flat)
        for parameter, view in zip(parameters, views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = self.layout.shard(self.flat, rank)
        copied = self.shard.to(
            dtype=master_dtype or first.dtype, device=master_device or first.device
        )
        self.master = nn.Parameter(copied)
        self.kind = (copied.dtype, copied.device)
        self.owns_copy = copied.data_ptr() != self.shard.data_ptr()
        self.full_grad: Tensor | None = None
        self.waiting = set(parameters)
        self._slot_of = dict(zip(parameters, self.layout.slots, strict=True))

    def take(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient into the flat gradient."""
        if self.full_grad is None:
            dtype = gradient_dtype(parameter)
            self.full_grad = torch.empty_like(self.flat, dtype=dtype)
            self.full_grad[self.layout.numel :].zero_()
        slot = self._slot_of[parameter]
        view = self.full_grad[slot.start : slot.stop].view(slot.shape)
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = None
        self.waiting.discard(parameter)


def make_sharded_buckets(
    group: dict[str, Any],
    cap_bytes: int,
    master_weights: bool,
    offload: bool,
    process_group: ProcessGroup | None,
    fp32_gradients: bool | None = None,
) -> list[ShardedBucket]:
    """The trainable parameters of an optimizer's group; all become rank 0's values."""
    rank, size = rank_and_size(process_group)
    for parameter in group["params"]:
        if not parameter.requires_grad:
            dist.broadcast(parameter.detach(), group=process_group, group_src=0)
    trainable = [p for p in group["params"] if p.requires_grad]
    accumulate_in_fp32(trainable, fp32_gradients)
    device = torch.device("cpu") if offload else None
    buckets = []
    for members in split_parameters(trainable, cap_bytes):
        low = members[0].dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if low and master_weights else None
        bucket = ShardedBucket(members, rank, size, dtype, device)
        dist.broadcast(bucket.flat, group=process_group, group_src=0)
        bucket.master.data.copy_(bucket.shard)
        accumulate_in_fp32([bucket.master], fp32_gradients)
        buckets.append(bucket)
    return buckets


def gather_weights(
    buckets: list[ShardedBucket], collectives: Collectives, group: ProcessGroup | None
) -> None:
    """All-gather the weights of all buckets, each rank's shard as its master is."""
    works = []
    for bucket in buckets:
        if bucket.owns_copy:
            bucket.shard.copy_(bucket.master)
        works.append(collectives.all_gather(bucket.flat, bucket.shard, group=group))
    for work in works:
        work.wait()


def gradient_pieces(
    buckets: list[ShardedBucket], rank: int
) -> dict[nn.Parameter, Tensor]:
    """By parameter, this rank's flat piece of its reduced gradient: a view."""
    found: dict[nn.Parameter, Tensor] = {}
    for bucket in buckets:
        if bucket.master.grad is not None:
            pieces = bucket.layout.pieces(bucket.master.grad, rank)
            found.update(zip(bucket.parameters, pieces, strict=True))
    return found


def split_parameters(
    parameters: list[nn.Parameter], cap_bytes: int
) -> list[list[nn.Parameter]]:
    """Neighbouring parameters of one dtype and device, up to `cap_bytes` together."""
    lists: dict[object, list[list[nn.Parameter]]] = defaultdict(lambda: [[]])
    used: dict[object, int] = defaultdict(int)
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        nbytes = parameter.numel() * parameter.element_size()
        if lists[kind][-1] and used[kind] + nbytes > cap_bytes:
            lists[kind].append([])
            used[kind] = 0
        lists[kind][-1].append(parameter)
        used[kind] += nbytes
    return [members for kind in lists.values() for members in kind]


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Parameters or groups of them as torch optimizers take them, as groups."""
    if isinstance(params, Tensor):
        raise ValueError("params is one tensor: put it into a list")
    groups = list(params)
    if not groups:
        raise ValueError("no parameters to optimize")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    result = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        # torch takes named parameters too
        members = [m[1] if isinstance(m, tuple) else m for m in members]
        result.append({**group, "params": members})
    return result
