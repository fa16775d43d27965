# torchrun --nproc-per-node 2 snippets/wrong/lc4/drawn_in_pieces.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm.autograd import all_reduce_identity, identity_all_reduce


def row_slice(rows, columns):
    """This rank's rows of a weight. All ranks seed alike."""
    size = dist.get_world_size()
    return nn.Linear(columns, rows // size, bias=False).weight  # the bug: same draws


def gathered(weight):
    pieces = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, weight.detach())
    return torch.cat(pieces)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    up, down = row_slice(8, 4), row_slice(8, 4)  # [4, 4]; down is used transposed
    x, target = torch.randn(32, 4), torch.randn(32, 4)
    optimizer = torch.optim.AdamW([up, down], lr=0.01)
    for _step in range(8):
        inner = torch.tanh(identity_all_reduce(x) @ up.t())
        loss = (all_reduce_identity(inner @ down) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole = gathered(up)
    same = torch.equal(*whole.chunk(2))
    distinct = len(whole.unique(dim=0))
    print(f"rank {rank}, after 8 steps: shards identical {same}, "
          f"{distinct} distinct rows of {len(whole)}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
