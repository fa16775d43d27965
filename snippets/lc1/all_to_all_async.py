# torchrun --nproc-per-node 4 snippets/lc1/all_to_all_async.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import all_to_all_single, all_to_all_single_async

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
tokens = torch.randn(size * 256, 64)
weight = torch.randn(64, 64)

arrived = torch.empty_like(tokens)
handle = all_to_all_single_async(arrived, tokens)  # issue
local = tokens @ weight  # compute: reads `tokens`, touches nothing that is on its way
handle.wait()  # from here on `arrived` is filled

expected = torch.empty_like(tokens)
all_to_all_single(expected, tokens)
same = torch.equal(arrived, expected) and torch.equal(local, tokens @ weight)
print(f"rank {rank}: {len(arrived)} tokens, same bits as without overlap: {same}")
assert same

dist.barrier()
dist.destroy_process_group()
