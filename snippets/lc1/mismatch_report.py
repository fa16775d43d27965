# torchrun --nproc-per-node 3 snippets/lc1/mismatch_report.py
import torch
import torch.distributed as dist

from xtrain import backends

backends.register()
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
    dtype = torch.int32 if rank == 2 else torch.float32  # both 4 bytes wide
    dist.all_reduce(torch.ones(4, dtype=dtype))


def another_reduce_op():
    op = dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(4), op)


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
            print(f"rank {rank} cannot see everybody")
total = torch.ones(1)
dist.all_reduce(total)  # all the same again: the group goes on
print(f"rank {rank}: {total.item():g} ranks are together")
dist.destroy_process_group()
