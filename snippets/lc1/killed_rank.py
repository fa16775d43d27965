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


def killed():
    os.kill(os.getpid(), signal.SIGKILL)  # no goodbye, no clean-up


def left():
    dist.destroy_process_group()


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)  # alive, but it never comes


def body(rank, fate, folder, pipe):
    torch.set_num_threads(1)
    backends.register()
    seconds = 4 if fate is stopped else 60
    dist.init_process_group(
        "xtrain-shm",
        store=dist.FileStore(f"{folder}/{fate.__name__}", 4),
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=seconds),
    )
    dist.all_reduce(torch.ones(4))
    if rank == 2:
        fate()
    else:
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            pipe.send(str(error))
    time.sleep(60)  # survivors stay: nobody learns of a death from a neighbour's exit


def main():
    for fate in (killed, left, stopped):
        with tempfile.TemporaryDirectory() as folder:
            pipes = [fork.Pipe() for _ in range(4)]
            arguments = [(r, fate, folder, pipes[r][1]) for r in range(4)]
            ranks = [fork.Process(target=body, args=each) for each in arguments]
            for process in ranks:
                process.start()
            print(f"rank 2 {fate.__name__}")
            for rank in (0, 1, 3):
                text = pipes[rank][0].recv().replace(FOLDER, "")
                if fate is stopped:  # without the seconds, which vary
                    text = text.partition(" for ")[0] + ";" + text.partition(";")[2]
                print(f"  rank {rank}: {text}")
            for process in ranks:
                process.kill()
                process.join()


main()
