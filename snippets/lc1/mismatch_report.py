# torchrun --nproc-per-node 3 snippets/lc1/mismatch_report.py
import os

import torch
import torch.distributed as dist

import xtrain.backends  # noqa: F401, it makes "xtrain-shm" known

os.environ["XTRAIN_COMPARE_LINES"] = "1"  # for the last mistake
dist.init_process_group("xtrain-shm")
rank = dist.get_rank()


def another_operation():
    if rank == 2:
        dist.broadcast(torch.ones(4), src=0)
    else:
        dist.all_reduce(torch.ones(4))


def another_root():
    dist.broadcast(torch.ones(4), src=rank // 2)


def another_shape():
    dist.all_reduce(torch.ones(5 if rank == 2 else 4))


def another_dtype():
    dist.all_reduce(torch.ones(4).int() if rank == 2 else torch.ones(4))


def another_reduce_op():
    dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank // 2])


def another_order():
    gradient, loss = torch.ones(4), torch.zeros(4)
    if rank == 2:
        dist.all_reduce(loss)
        dist.all_reduce(gradient)
    else:
        dist.all_reduce(gradient)
        dist.all_reduce(loss)


mistakes = [another_operation, another_root, another_shape, another_dtype]
for mistake in [*mistakes, another_reduce_op, another_order]:
    try:
        mistake()
    except RuntimeError as error:
        report = str(error).replace(__file__.rpartition("/")[0] + "/", "")
        if rank == 0:
            print(f"{mistake.__name__}: {report}\n")
        elif report.count("rank") < 3:
            print(f"rank {rank} cannot see every rank")
total = torch.ones(1)
dist.all_reduce(total)  # all the same again: the group goes on
print(f"rank {rank}: {total.item():g} ranks are together")
dist.destroy_process_group()
