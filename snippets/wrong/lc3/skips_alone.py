# torchrun --nproc-per-node 2 snippets/wrong/lc3/skips_alone.py
import os

import torch
import torch.distributed as dist


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def unscale(self, shards):
        """Divide my shards of the gradient; True if the step may be taken."""
        for shard in shards:
            shard.div_(self.scale)
        finite = all(bool(torch.isfinite(shard).all()) for shard in shards)
        if not finite:  # the bug: the others have not seen what I have seen
            self.scale /= 2
        return finite


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    scaler = Scaler(1024.0)
    shard = torch.zeros(2)  # my half of the weights
    weights = [torch.empty(2), torch.empty(2)]
    for step in range(3):
        gradient = torch.full((2,), scaler.scale)  # of my scaled loss; 1 in truth
        dist.all_reduce(gradient)
        gradient /= 2
        if step == 1 and rank == 1:
            gradient[0] = float("inf")  # an overflow in the half of rank 1
        if scaler.unscale([gradient]):
            shard -= gradient
        dist.all_gather(weights, shard)
        print(f"rank {rank}, step {step}: scale {scaler.scale:g}, "
              f"all weights {torch.cat(weights).tolist()}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
