"""DistributedDataParallel: gradients are averaged in buckets while backward computes.

Computes:   the average of every gradient over the ranks, ready when backward returns.
Sends:      2(N-1)/N of the gradients a step, in one all-reduce a bucket.
Leaves out: no_sync, mixed dtypes, fp32 sums of 16-bit gradients, buffers, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DistributedDataParallel(nn.Module):
    """What takes no part in a backward counts as a gradient of zero."""

    def __init__(
        self, module: nn.Module, process_group: Any = None, bucket_cap_mb: float = 25
    ):
        super().__init__()
        self.module, self.group = module, process_group
        self.size = dist.get_world_size(process_group)
        for tensor in (*module.parameters(), *module.buffers()):  # begin as rank 0
            dist.broadcast(tensor.detach(), group=process_group, group_src=0)
        buckets: list[list[Tensor]] = [[]]
        for p in [p for p in module.parameters() if p.requires_grad][::-1]:
            if sum(q.nbytes for q in [*buckets[-1], p]) > bucket_cap_mb * 2**20:
                buckets.append([])
            buckets[-1].append(p)  # from the last layer to the first, as backward goes
            p.register_post_accumulate_grad_hook(self._gradient_is_ready)
        self.buckets = [bucket for bucket in buckets if bucket]
        self.ready: set[Tensor] = set()  # what has its gradient in this backward
        self.works: list[Any] = []  # of the buckets that have left, the first ones

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        if not self.ready:  # the first one asks for a call at the end of backward
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.works) :]:  # in the same order on all ranks
            if not self.ready.issuperset(bucket):
                break
            self._launch(bucket)

    def _launch(self, bucket: list[Tensor]) -> None:
        for p in bucket:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads: list[Any] = [p.grad for p in bucket]
        flat = nn.utils.parameters_to_vector(grads) / self.size
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.works.append((work, flat, grads))

    def _finish(self) -> None:
        for bucket in self.buckets[len(self.works) :]:  # a part of it got no gradient
            self._launch(bucket)
        for work, flat, grads in self.works:
            work.wait()
            nn.utils.vector_to_parameters(flat, grads)  # now they are views of flat
        self.ready, self.works = set(), []
