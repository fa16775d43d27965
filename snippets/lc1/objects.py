# torchrun --nproc-per-node 2 snippets/lc1/objects.py
import torch.distributed as dist

from xtrain import comm

dist.init_process_group("gloo")
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
