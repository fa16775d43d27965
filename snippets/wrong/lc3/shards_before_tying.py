# torchrun --nproc-per-node 4 snippets/wrong/lc3/shards_before_tying.py
import os

import torch
import torch.distributed as dist

# Ranks 0 and 1 hold the first stage of a pipeline, 2 and 3 the last. The embedding
# of the first and the head of the last are one tied weight: its gradients add up.
PARTS = {0: ["tied", "inner"], 1: ["inner", "tied"]}  # the order within each stage


def reduce(gradients, stage, data_group, tied_group):
    """Meant: my shard of the mean over the data ranks, tied parts added."""
    flat = torch.cat([gradients[name] for name in PARTS[stage]])
    shards = list(flat.chunk(2))
    mine = torch.empty_like(shards[0])
    dist.reduce_scatter(mine, shards, group=data_group)
    dist.all_reduce(mine, group=tied_group)  # the bug: theirs is another shard
    return mine / 2


def place():
    """My stage, my rank within it, the group of my stage, and who has my place."""
    stage, data_rank = divmod(dist.get_rank(), 2)
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return stage, data_rank, stages[stage], columns[data_rank]


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    stage, data_rank, data_group, tied_group = place()
    tied = torch.tensor([[1.0, 1.0], [10.0, 10.0]][stage])  # to be added: 11
    gradients = {"tied": tied, "inner": torch.tensor([100.0, 100.0]) * (stage + 1)}
    shard = reduce(gradients, stage, data_group, tied_group)
    held = PARTS[stage][data_rank]
    right = 11.0 if held == "tied" else 100.0 * (stage + 1)
    print(f"rank {dist.get_rank()}, stage {stage}, holds the gradient of {held}: "
          f"{shard.tolist()}, right is {[right, right]}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
