# python snippets/wrong/lc2/runs_out_early.py
import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedDataParallel
from xtrain.testing import RankTimeout, World


def train(model, batches):
    steps = 0
    for batch in batches:  # the bug: one rank has fewer, and stays away
        model(batch).sum().backward()
        steps += 1
    return steps


def program(train):
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(2, 1))
    return train(model, torch.ones(3 - rank, 1, 2))  # 3, 2 and 1 batches


if __name__ == "__main__":
    with World(3) as world:
        try:
            print(world.run(program, train, timeout=2))
        except RankTimeout as error:
            print(error.headline)
            for report in error.reports:
                where = report.summary.partition(" (")[0]
                print(f"rank {report.rank}: {where or 'has returned'}")
            print("the stack of rank 0, without the lines inside torch and xtrain:")
            for call in error.reports[0].detail.split("  File ")[1:]:
                if "runs_out_early.py" in call:
                    print(f"  {call.partition(', ')[2]}", end="")
