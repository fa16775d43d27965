# torchrun --nproc-per-node 2 snippets/wrong/lc3/stale_weights.py
import os

import torch
import torch.distributed as dist


class ShardedLinear:
    """A row of weights, half of it on each rank."""

    def __init__(self, weights):
        self.shard = weights.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.full = None

    def gather(self):
        if self.full is None:  # the bug: filled once, and a step makes it old
            shards = [torch.empty_like(self.shard) for _ in range(2)]
            dist.all_gather(shards, self.shard)
            self.full = torch.cat(shards).requires_grad_()
        return self.full

    def step(self, lr):
        shards = list(self.full.grad.chunk(2))
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter(mine, shards)
        self.shard -= lr * mine / 2
        self.full.grad = None


def train(layer, data, steps):
    losses = []
    for _step in range(steps):
        loss = (data @ layer.gather() - data.sum(1)).square().mean()
        loss.backward()
        layer.step(lr=0.1)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data = torch.randn(16, 4)
    layer = ShardedLinear(torch.zeros(4))
    for round_ in range(3):
        losses = " ".join(f"{loss:.3f}" for loss in train(layer, data, 3))
        norm = layer.shard.norm()
        print(f"rank {rank}: losses {losses}, norm of my shard {norm:.3f}")

    dist.barrier()
    dist.destroy_process_group()
