# torchrun --nproc-per-node 4 snippets/lc1/groups.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import broadcast

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

# Every rank makes every group, in the same order, also those it is not in.
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = groups[rank // 2]
members = dist.get_process_group_ranks(mine)
print(f"global rank {rank} is rank {dist.get_rank(mine)} of {members}")

tensor = torch.tensor([float(rank)])
dist.all_reduce(tensor, group=mine)
print(f"  sum inside the group: {tensor.item()}")

# src is a global rank; group_src counts inside the group. Both name the first member.
by_global, by_group = torch.tensor(100 + rank), torch.tensor(100 + rank)
broadcast(by_global, src=members[0], group=mine)
broadcast(by_group, group_src=0, group=mine)
print(f"  src={members[0]} gives {by_global.item()}, group_src=0 {by_group.item()}")
assert dist.get_global_rank(mine, 0) == members[0]
assert by_global.item() == by_group.item() == 100 + members[0]

dist.barrier()
dist.destroy_process_group()
