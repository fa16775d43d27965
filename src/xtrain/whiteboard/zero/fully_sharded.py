"""ZeRO-3, or FSDP: every rank holds 1/N of weights, gradients and optimizer state.

Computes:   the module's output; the average of the gradients, in the shards' `grad`.
Sends:      3(N-1)/N of the parameters a step: all-gather twice, reduce-scatter once.
Leaves out: prefetch, recomputation, ties across blocks, frozen blocks, checks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class FullySharded(nn.Module):
    """Blocks are the children of ModuleLists; the optimizer steps `parameters()`."""

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = module, process_group
        for tensor in (*module.parameters(), *module.buffers()):  # begin as rank 0
            dist.broadcast(tensor.detach(), group=process_group, group_src=0)
        whole = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for blocks in [m for m in module.modules() if isinstance(m, nn.ModuleList)]:
            for i, block in enumerate(blocks):
                if not isinstance(block, FullySharded):
                    blocks[i] = FullySharded(block, process_group)
        flat = torch.cat([p.detach().flatten() for p in whole.values()])
        rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.full = nn.functional.pad(flat, (0, -len(flat) % self.size))
        self.shard = nn.Parameter(self.full.chunk(self.size)[rank].clone())
        self.shapes = {n: p.shape for n, p in whole.items() if p.numel()}  # not blocks'
        for p in whole.values():
            p.data = p.data.new_empty(0)
        self.full.untyped_storage().resize_(0)  # the tensor stays, its memory goes
        self.full.requires_grad_().register_post_accumulate_grad_hook(self._reduce)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        self._gather()
        sizes = [shape.numel() for shape in self.shapes.values()]
        views = iter(self.full.split([*sizes, len(self.full) - sum(sizes)]))
        weights = {name: next(views).view(shape) for name, shape in self.shapes.items()}
        output = torch.func.functional_call(self.module, weights, args, kwargs)
        self.full.untyped_storage().resize_(0)
        if output.requires_grad:
            output.register_hook(lambda _: self._gather())  # its backward begins
        return output

    def _gather(self) -> None:
        self.full.untyped_storage().resize_(len(self.full) * self.full.itemsize)
        _all_gather(self.full.data, self.shard.data, group=self.group)  # no new version

    def _reduce(self, full: Tensor) -> None:  # the block's last gradient is complete
        full.untyped_storage().resize_(0)
        mine = torch.empty_like(self.shard)
        _reduce_scatter(mine, full.grad, group=self.group)
        full.grad, old = None, self.shard.grad
        self.shard.grad = mine / self.size + (0 if old is None else old)
