# torchrun --nproc-per-node 2 snippets/lc1/p2p_overlap.py
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist

from xtrain.comm import irecv, isend

gpus = torch.cuda.device_count()  # two ranks share one only if NCCL is told so
cuda = gpus >= 2 or (gpus == 1 and "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ)
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % gpus) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
# NCCL has a stream of its own, which waits for what the calling stream holds. Called
# from a side stream the message does not wait for the computation. On a CPU gloo's own
# threads carry it.
side = torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext()

message = torch.full((1 << 20,), float(rank), device=device)
incoming = torch.full_like(message, -1.0)
x = torch.randn(64, 64, device=device) / 8
if cuda:
    torch.cuda.synchronize()  # the buffers are filled before another stream reads them

with side:
    if rank == 0:
        work = isend(message, dst=1)
    else:
        work = irecv(incoming, src=0)
steps = 0
while steps < 100 or (rank == 1 and not cuda and incoming[-1] == -1.0):
    x = x @ x.T  # computing, without a wait for the message
    x, steps = x / x.norm(), steps + 1
# A peek, to show that it came while we computed. Real code does not look: it waits.
here = (incoming[-1] == 0.0).item()
work.wait()  # on a GPU: the current stream waits, not the CPU

if rank == 1:
    print(f"on {device.type}: computed, and meanwhile the message arrived: {here}")
    assert (incoming == 0.0).all()

dist.barrier()
dist.destroy_process_group()
