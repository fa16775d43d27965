# python snippets/lc1/init_methods.py
import os
import socket
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port():
    """A port that is not in use: the system picks one when asked for port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def work(rank, size, ports, file):
    """One process of `size`; `spawn` tells it its rank and passes the arguments."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    who = {"rank": rank, "world_size": size}
    meetings = {
        "environment": {"init_method": "env://"},
        "address": {"init_method": f"tcp://127.0.0.1:{ports[1]}", **who},
        "shared file": {"init_method": f"file://{file}", **who},
    }
    for name, arguments in meetings.items():
        dist.init_process_group("gloo", **arguments)
        total = torch.tensor(10**rank)
        dist.all_reduce(total)
        if rank == 0:
            print(f"met by {name}: {dist.get_world_size()} ranks, sum {total.item()}")
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":  # spawned processes import this file again
    with tempfile.TemporaryDirectory() as folder:
        ports = [free_port(), free_port()]
        mp.spawn(work, (2, ports, os.path.join(folder, "meeting")), nprocs=2)
    print("all processes ended well")
