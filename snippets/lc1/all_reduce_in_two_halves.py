# torchrun --nproc-per-node 4 snippets/lc1/all_reduce_in_two_halves.py
import os

import torch
import torch.distributed as dist

from xtrain import comm

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
data = torch.randn(4096)

whole = data.clone()
with comm.CommLedger() as one_call:
    comm.ring_all_reduce(whole)

piece = torch.empty(data.numel() // size)
halves = torch.empty_like(data)
with comm.CommLedger() as first_half:
    comm.ring_reduce_scatter(piece, data)  # rank r: the sum of chunk r
with comm.CommLedger() as second_half:
    comm.ring_all_gather(halves, piece)  # every rank has all sums

if rank == 0:
    print(f"same bits: {torch.equal(whole, halves)}")
    print(f"all-reduce sends     {one_call.bytes_sent} bytes")
    print(f"reduce-scatter sends {first_half.bytes_sent} bytes")
    print(f"all-gather sends     {second_half.bytes_sent} bytes")
assert torch.equal(whole, halves)
assert one_call.bytes_sent == first_half.bytes_sent + second_half.bytes_sent

dist.barrier()
dist.destroy_process_group()
