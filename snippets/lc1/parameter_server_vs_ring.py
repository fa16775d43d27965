# torchrun --nproc-per-node 4 snippets/lc1/parameter_server_vs_ring.py
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
data = torch.full((1024,), 10.0**rank)

for algorithm in (comm.parameter_server_all_reduce, comm.ring_all_reduce):
    tensor = data.clone()
    with comm.CommLedger() as ledger:
        algorithm(tensor)
    assert (tensor == sum(10.0**r for r in range(size))).all()

    sent = [None] * size
    dist.all_gather_object(sent, ledger.bytes_sent / data.nbytes)
    if rank == 0:
        print(f"{algorithm.__name__}: each rank sends, in units of the tensor:")
        print(f"  {sent}, the busiest {max(sent)}")

dist.barrier()
dist.destroy_process_group()
