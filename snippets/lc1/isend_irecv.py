# torchrun --nproc-per-node 2 snippets/lc1/isend_irecv.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import irecv, isend

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

if rank == 0:
    # A buffer for each message: none may change before its wait has returned.
    in_flight = [torch.full((2,), float(number)) for number in range(3)]
    works = [isend(buffer, dst=1) for buffer in in_flight]
    print(f"rank 0 started {len(works)} sends")
    for work in works:
        work.wait()
    print("rank 0 may use its buffers again")
else:
    landing = [torch.full((2,), -1.0) for _ in range(3)]
    works = [irecv(buffer, src=0) for buffer in landing]
    print(f"rank 1 started {len(works)} receives")
    for number, work in enumerate(works):
        work.wait()  # before this, landing[number] is not to be read
        print(f"rank 1: message {number} is {landing[number].tolist()}")
    # Messages between two ranks arrive in the order in which they were sent.
    assert [buffer[0].item() for buffer in landing] == [0.0, 1.0, 2.0]

dist.barrier()
dist.destroy_process_group()
