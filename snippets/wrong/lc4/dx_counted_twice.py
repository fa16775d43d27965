# torchrun --nproc-per-node 2 snippets/wrong/lc4/dx_counted_twice.py
import os

import torch
import torch.distributed as dist

from xtrain.comm.autograd import identity_all_reduce


def query_and_key(x, query_shard, key_weight):
    """This rank's query heads, and the one key head, which all ranks hold."""
    x = identity_all_reduce(x)  # f: dX is summed over the ranks
    query = x @ query_shard.t()
    key = identity_all_reduce(x @ key_weight.t())  # the bug: then dX counts it N times
    return query, key


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    x, queries, key = (torch.randn(n, 4).double() for n in (3, 4, 2))
    used = torch.randn(2, 3, 2).double()  # every rank uses both in its own way
    shards = queries.chunk(2)
    right_dx = {
        "query": used[0] @ shards[0] + used[1] @ shards[1],
        "key": (used[0] + used[1]) @ key,
    }
    for number, name in enumerate(right_dx):
        here, weight = x.clone().requires_grad_(), key.clone().requires_grad_()
        output = query_and_key(here, shards[rank], weight)[number]
        (output * used[rank]).sum().backward()
        ratio = (here.grad / right_dx[name]).mean()
        print(f"rank {rank}: dX through the {name:5} is {ratio:.2f} times right")
    ratio = (weight.grad / (used.sum(0).t() @ x)).mean()
    print(f"rank {rank}: dW of the key is {ratio:.2f} times right")

    dist.barrier()
    dist.destroy_process_group()
