# torchrun --nproc-per-node 4 snippets/lc1/under_nccl_rules.py
import torch
import torch.distributed as dist

import xtrain.backends  # noqa: F401  (it makes the backend known to torch)

dist.init_process_group("nccl-rules")  # was: "gloo"
rank, size = dist.get_rank(), dist.get_world_size()

gradient = torch.full((4, 2), float(rank))
work = dist.all_reduce(gradient, dist.ReduceOp.AVG, async_op=True)
work.wait()

mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
calls = [
    dist.P2POp(dist.isend, mine, (rank + 1) % size),
    dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
]
for work in dist.batch_isend_irecv(calls):
    work.wait()
print(f"rank {rank}: gradient {gradient[0, 0].item()}, received {incoming.item()}")
dist.barrier()
dist.destroy_process_group()
