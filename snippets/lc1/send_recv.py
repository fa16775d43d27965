# torchrun --nproc-per-node 2 snippets/lc1/send_recv.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import recv, send

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

if rank == 0:
    tensor = torch.arange(6.0).view(2, 3)
    send(tensor, dst=1)
    print(f"rank 0 sent {tensor.tolist()}")
else:
    # The receiver brings the memory: right shape and dtype, any contents.
    tensor = torch.full((2, 3), -1.0)
    sender = recv(tensor, src=0)
    print(f"rank 1 received {tensor.tolist()} from rank {sender}")
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))

dist.barrier()
dist.destroy_process_group()
