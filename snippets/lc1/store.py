# torchrun --nproc-per-node 3 snippets/lc1/store.py
import os
from datetime import timedelta

import torch
import torch.distributed as dist

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# One store for all: rank 0 serves it on a port the system picks and tells the port.
server = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
port = [server.port] if rank == 0 else [None]
dist.broadcast_object_list(port, src=0)
store = server or dist.TCPStore("127.0.0.1", port[0], is_master=False)

# A counter: the server does one add after another, so none is lost.
for _ in range(100):
    store.add("hits", 1)

# wait: blocks until a rank has set the key.
if rank == size - 1:
    store.set("answer", "42")
store.wait(["answer"], timedelta(seconds=5))
print(f"rank {rank} read answer {store.get('answer').decode()}")

# compare_set: of all who try to replace "" by their name, one succeeds.
leader = store.compare_set("leader", "", f"rank {rank}").decode()
dist.barrier()
agreed = [None] * size
dist.all_gather_object(agreed, (leader, store.get("hits").decode()))
if rank == 0:
    leaders, hits = {name for name, _ in agreed}, {count for _, count in agreed}
    print(f"hits as seen by all ranks: {hits}, leaders: {len(leaders)}")

dist.barrier()  # rank 0 is the server: it leaves last
dist.destroy_process_group()
