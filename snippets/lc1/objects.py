# torchrun --nproc-per-node 2 snippets/lc1/objects.py
import os

import torch
import torch.distributed as dist

from xtrain import comm

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
note = {"step": 7, "loss": 0.25, "layers": ["embedding", "mlp"]}

with comm.CommLedger() as ledger:
    if rank == 0:
        comm.send_object(note, dst=1)
    else:
        received = comm.recv_object(src=0)

if rank == 0:
    print(f"sent {note}")
    for event in ledger.events:
        print(f"  a message of {event.nbytes} bytes")
else:
    print(f"received {received}, equal: {received == note}")

dist.barrier()
dist.destroy_process_group()
