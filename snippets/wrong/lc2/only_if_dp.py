# torchrun --nproc-per-node 2 snippets/wrong/lc2/only_if_dp.py
import os
from textwrap import fill

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedDataParallel, check_replicas


def wrap(model, dp, cp):
    """dp x cp ranks: dp batches, each text of them cut into cp pieces."""
    if dp > 1:  # the bug: ranks that share a text have other gradients, too
        model = DistributedDataParallel(model)
    return model


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    text = torch.randn(2, 16, 4)[rank]  # one text, my half of its tokens
    model = wrap(nn.Linear(4, 1), dp=1, cp=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(13):
        optimizer.zero_grad()
        loss = (model(text) - text.square().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            norm = next(model.parameters()).norm().item()
            print(f"rank {rank}, step {step:2}: loss {loss.item():.3f}, "
                  f"norm of the weights {norm:.4f}")  # fmt: skip

    try:
        check_replicas(model)
    except RuntimeError as error:
        print(fill(f"rank {rank}: {error}", 84, subsequent_indent="  "))

    dist.barrier()
    dist.destroy_process_group()
