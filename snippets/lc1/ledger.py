# torchrun --nproc-per-node 4 snippets/lc1/ledger.py
import torch
import torch.distributed as dist

from xtrain import comm

# gloo sends over TCP, whose counters the ledger reads; NCCL does not.
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
whole = torch.zeros(1 << 22)  # 16 MiB
pieces = list(whole.chunk(size))
piece = torch.zeros_like(pieces[0])

calls = {
    "gloo  all_reduce": lambda: dist.all_reduce(whole),
    "ours  all_reduce": lambda: comm.ring_all_reduce(whole),
    "gloo  all_gather": lambda: dist.all_gather(pieces, piece),
    "ours  all_gather": lambda: comm.ring_all_gather(whole, piece),
    "gloo  reduce_scatter": lambda: dist.reduce_scatter(piece, pieces),
    "ours  reduce_scatter": lambda: comm.ring_reduce_scatter(piece, whole),
}
for name, call in calls.items():
    with comm.CommLedger() as ledger:
        call()
        dist.barrier()  # so that everything has left
    payload = ledger.bytes_sent / whole.nbytes if "ours" in name else "?"
    # To the nearest quarter: headers, and what had to be sent again, are far less.
    quarters = round(4 * ledger.wire_bytes / whole.nbytes)
    if rank == 0:
        print(f"{name:20}  payload {payload:<4}  on the wire {quarters / 4}")

dist.barrier()
dist.destroy_process_group()
