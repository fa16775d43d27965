# torchrun --nproc-per-node 4 snippets/lc1/all_to_all_async.py
import torch
import torch.distributed as dist

from xtrain.comm import all_to_all_single, all_to_all_single_async

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(rank)
tokens = torch.randn(size * 256, 64, generator=generator)
weight = torch.randn(64, 64, generator=generator)

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
