# torchrun --nproc-per-node 4 snippets/lc1/parameter_server_vs_ring.py
import torch
import torch.distributed as dist

from xtrain import comm

dist.init_process_group("gloo")
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
