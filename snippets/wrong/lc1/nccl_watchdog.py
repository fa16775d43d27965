# python snippets/wrong/lc1/nccl_watchdog.py
from datetime import timedelta

import torch
import torch.distributed as dist

from xtrain.testing import RankError, World


def wrong():
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return "skips a bad batch"
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:  # the bug: NCCL raises nothing here
        return "saves a checkpoint"


def right():
    bad = torch.tensor([dist.get_rank()])  # rank 1 has a bad batch
    dist.all_reduce(bad, dist.ReduceOp.MAX)  # all ranks learn of it
    return "skips a batch that is bad on some rank" if bad.item() else "trains"


if __name__ == "__main__":
    for backend in ("gloo", "nccl-rules"):
        with World(2, backend) as world:
            for program in (right, wrong):
                try:
                    print(f"{backend}, {program.__name__}:", world.run(program))
                except RankError as error:
                    message, *_ = error.reports[0].detail.splitlines()
                    print(f"{backend}, {program.__name__}:", message)
