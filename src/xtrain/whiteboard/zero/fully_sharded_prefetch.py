"""FSDP with prefetch: the next block's weights are gathered while this one computes.

Computes:   a chain of blocks; the average of the gradients, in the shards' `grad`.
Sends:      3(N-1)/N of the parameters a step: all-gather twice, reduce-scatter once.
Leaves out: equal weights at the start, other modules than a chain, buffers, checks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class FullyShardedPrefetch(nn.Module):
    """Calls the children of `module` one after the other, as an nn.Sequential does."""

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None):
        super().__init__()
        self.blocks, self.group = list(module.children()), process_group
        self.fulls, self.works = list[Tensor](), dict[int, dist.Work]()
        self.shards = nn.ParameterList()
        rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        for i, block in enumerate(self.blocks):
            full = nn.utils.parameters_to_vector(block.parameters()).detach()
            full = nn.functional.pad(full, (0, -len(full) % self.size))
            self.shards.append(nn.Parameter(full.chunk(self.size)[rank].clone()))
            self.fulls.append(full.requires_grad_())
            full.register_post_accumulate_grad_hook(lambda f, i=i: self._reduce(i, f))
            full.untyped_storage().resize_(0)  # the tensor stays, its memory goes
            block.to("meta")  # keeps names and shapes

    def forward(self, x: Tensor) -> Tensor:
        for i, (block, full) in enumerate(zip(self.blocks, self.fulls, strict=True)):
            self._gather(i, prefetch=i + 1)
            sizes = [p.numel() for p in block.parameters()]
            views = iter(full.split([*sizes, len(full) - sum(sizes)]))
            weights = {n: next(views).view_as(p) for n, p in block.named_parameters()}
            x = torch.func.functional_call(block, weights, x)
            full.untyped_storage().resize_(0)
            if x.requires_grad:
                x.register_hook(lambda _, i=i: self._gather(i, prefetch=i - 1))
        return x

    def _gather(self, i: int, prefetch: int) -> None:
        for j in [j for j in (i, prefetch) if 0 <= j < len(self.fulls)]:
            full, own = self.fulls[j].data, self.shards[j].data
            if not full.untyped_storage().size():
                full.untyped_storage().resize_(len(full) * full.itemsize)
                self.works[j] = _all_gather(full, own, group=self.group, async_op=True)
        self.works[i].wait()  # the other one is on its way

    def _reduce(self, i: int, full: Tensor) -> None:
        full.untyped_storage().resize_(0)
        own, mine = self.shards[i], torch.empty_like(self.shards[i])
        _reduce_scatter(mine, full.grad, group=self.group)
        full.grad = None
        own.grad = mine / self.size + (0 if own.grad is None else own.grad)
