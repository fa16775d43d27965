# torchrun --nproc-per-node 2 snippets/lc1/bad_input.py
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
x = torch.zeros(6)

# Wrong on every rank: each sees it alone, before the first message.
wrong_everywhere = [
    lambda: comm.ring_all_gather(torch.zeros(6), x),
    lambda: comm.ring_all_gather(torch.zeros(12, dtype=torch.int64), x),
    lambda: comm.ring_all_reduce(torch.arange(4), dist.ReduceOp.AVG),
    lambda: comm.all_to_all_single(torch.zeros(6), x, [3, 3], [3, 4]),
    lambda: comm.broadcast(x, src=2),
    lambda: comm.init_mesh((2, 2), ("data", "tensor")),
]
for call in wrong_everywhere:
    try:
        call()
    except ValueError as error:
        if rank == 0:
            print(error)

# Right on each rank alone, wrong together: only the others' answers can tell.
try:
    with comm.debug_checks():
        comm.ring_all_reduce(torch.zeros(4 + rank))
except ValueError as error:
    print(f"rank {rank}: {error}")

dist.barrier()
dist.destroy_process_group()
