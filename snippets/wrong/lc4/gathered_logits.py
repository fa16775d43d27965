# torchrun --nproc-per-node 2 snippets/wrong/lc4/gathered_logits.py
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.comm.autograd import all_gather_split
from xtrain.tensor_parallel import vocab_parallel_cross_entropy


def loss_of(logits, labels):
    """The loss of logits whose vocabulary is cut over the ranks."""
    whole = all_gather_split(logits, -1)  # the bug: the loss wants this rank's columns
    return vocab_parallel_cross_entropy(whole, labels)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 6), torch.tensor([0, 3, 5, 2])
    right = F.cross_entropy(logits, labels)
    loss = loss_of(logits.chunk(2, 1)[rank], labels)
    print(f"rank {rank}: loss {loss:.4f}, right is {right:.4f}: "
          f"{loss - right:.4f} more; log 2 is {math.log(2):.4f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
