"""ZeRO-3, or FSDP: every rank holds 1/N of weights, gradients and optimizer state.

Computes:   the module's output; the average of the gradients, in the shards' `grad`.
Sends:      3(N-1)/N of the parameters a step: all-gather twice, reduce-scatter once.
Leaves out: prefetch, recompute, ties, frozen blocks, fp32 sums of 16 bits, checks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class FullySharded(nn.Module):
    """Blocks are the children of ModuleLists; the optimizer steps `parameters()`."""

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = module, process_group
        self.size = dist.get_world_size(process_group)
        for tensor in (*module.parameters(), *module.buffers()):  # begin as rank 0
            dist.broadcast(tensor.detach(), group=process_group, group_src=0)
        mine = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._wrap_blocks()  # which take their parameters and leave them empty
        self._shard(mine)

    def _wrap_blocks(self) -> None:
        modules = list(self.module.modules())
        for blocks in [m for m in modules if isinstance(m, nn.ModuleList)]:
            for i, block in enumerate(blocks):
                if not isinstance(block, FullySharded):
                    blocks[i] = FullySharded(block, self.group)

    def _shard(self, parameters: dict[str, nn.Parameter]) -> None:
        flat = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.full = nn.functional.pad(flat, (0, -len(flat) % self.size))
        mine = self.full.chunk(self.size)[dist.get_rank(self.group)]
        self.shard = nn.Parameter(mine.clone())
        self.shapes = {n: p.shape for n, p in parameters.items() if p.numel()}
        for p in parameters.values():
            p.data = p.data.new_empty(0)
        self._free()
        self.full.requires_grad_().register_post_accumulate_grad_hook(self._reduce)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        self._gather()
        output = torch.func.functional_call(self.module, self._views(), args, kwargs)
        self._free()
        if output.requires_grad:
            output.register_hook(lambda _: self._gather())  # its backward begins
        return output

    def _views(self) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = self.full.split([*sizes, len(self.full) - sum(sizes)])  # the rest: pad
        named = zip(self.shapes.items(), parts, strict=False)
        return {name: part.view(shape) for (name, shape), part in named}

    def _gather(self) -> None:
        self.full.untyped_storage().resize_(len(self.full) * self.full.itemsize)
        _all_gather(self.full.data, self.shard.data, group=self.group)  # no new version

    def _free(self) -> None:  # the tensor stays, in the graph too; its memory goes
        self.full.untyped_storage().resize_(0)

    def _reduce(self, full: Tensor) -> None:  # the block's last gradient is complete
        self._free()
        mine = torch.empty_like(self.shard)
        _reduce_scatter(mine, full.grad, group=self.group)
        full.grad, old = None, self.shard.grad
        self.shard.grad = mine / self.size + (0 if old is None else old)
