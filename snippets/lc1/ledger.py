# torchrun --nproc-per-node 4 snippets/lc1/ledger.py
import torch
import torch.distributed as dist

from xtrain import comm

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
    payload = ledger.bytes_sent / whole.nbytes if "ours" in name else None
    on_wire = ledger.wire_bytes and f"{ledger.wire_bytes / whole.nbytes:.2f}"
    if rank == 0:
        print(f"{name:20}  payload {payload}, on the wire {on_wire}")

dist.barrier()
dist.destroy_process_group()
