"""What both hosts run in `test_two_hosts`: an all-reduce, a DDP step, then no end."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import xtrain.backends


def main() -> None:
    torch.set_num_threads(1)
    xtrain.backends.register()
    dist.init_process_group("xtrain-socket", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    total = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(total)
    say("sum", *total.unique().tolist())

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(rank))).backward()
    say("gradient", *model.module.weight.grad.flatten().tolist())
    say("ready")
    try:
        while True:
            dist.all_reduce(torch.ones(1 << 18))
    except RuntimeError as error:
        say("raised", str(error))


def say(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    main()
