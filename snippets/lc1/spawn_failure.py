# python snippets/lc1/spawn_failure.py
import os
import time

from torch.multiprocessing import start_processes
from torch.multiprocessing.spawn import ProcessException


def work(rank, how):
    if rank != 1:
        time.sleep(600)  # busy: it cannot notice that another rank has failed
    elif how == "raises":
        raise ValueError("rank 1 has no data")
    else:
        os._exit(3)  # as after a crash in C++, or when the system runs out of memory


if __name__ == "__main__":
    for how in ("raises", "exits"):
        started = time.monotonic()
        # spawn() is this call with "spawn", which imports torch anew in each process.
        ranks = start_processes(work, (how,), nprocs=3, join=False, start_method="fork")
        try:
            while not ranks.join():  # False while some are alive; join=True does this
                pass
        except ProcessException as error:  # of the first rank that failed
            print(f"{type(error).__name__}: rank {error.error_index}")
            print("  its end:", str(error).strip().splitlines()[-1])
        alive = any(process.is_alive() for process in ranks.processes)
        early = time.monotonic() - started < 600
        print(f"  others still alive: {alive}, ended early: {early}")
