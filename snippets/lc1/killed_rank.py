# python snippets/lc1/killed_rank.py
import multiprocessing
import os
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from xtrain import backends

FOLDER = os.path.dirname(__file__) + "/"
fork = multiprocessing.get_context("fork")


FATES = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),  # no goodbye
    "left": dist.destroy_process_group,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),  # it never comes
}


def body(rank, fate, folder, pipe):
    backends.register()
    store = dist.FileStore(f"{folder}/{fate}", 4)
    limit = timedelta(seconds=4 if fate == "stopped" else 60)
    dist.init_process_group(
        "xtrain-shm", store=store, rank=rank, world_size=4, timeout=limit
    )
    dist.all_reduce(torch.ones(4))
    if rank == 2:
        FATES[fate]()
    else:
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            pipe.send(str(error))
    time.sleep(60)  # survivors stay: only the dead rank closes connections


for fate in FATES:
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe() for _ in range(4)]
        arguments = [(r, fate, folder, pipes[r][1]) for r in range(4)]
        ranks = [fork.Process(target=body, args=each) for each in arguments]
        for process in ranks:
            process.start()
        print(f"rank 2 {fate}")
        for rank in (0, 1, 3):
            text = pipes[rank][0].recv().replace(FOLDER, "")
            if fate == "stopped":  # without the seconds, which vary
                text = text.partition(" for ")[0] + ";" + text.partition(";")[2]
            print(f"  rank {rank}: {text}")
        for process in ranks:
            process.kill()
            process.join()
