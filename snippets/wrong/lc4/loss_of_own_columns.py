# torchrun --nproc-per-node 2 snippets/wrong/lc4/loss_of_own_columns.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F


def pick(logits, labels):
    """The labels' logits, where they are mine; zero elsewhere."""
    local = labels - dist.get_rank() * logits.shape[-1]
    mine = (local >= 0) & (local < logits.shape[-1])
    found = logits.gather(-1, local.where(mine, 0).unsqueeze(-1)).squeeze(-1)
    return found * mine, mine


def without_max(logits, labels):
    sums = logits.exp().sum(-1)  # the bug: exp(89) is too large for fp32
    target, _ = pick(logits, labels)
    for part in (sums, target):
        dist.all_reduce(part)
    return (sums.log() - target).mean()


def own_max(logits, labels):
    logits = logits - logits.amax(-1, keepdim=True)  # the bug: another on each rank
    return without_max(logits, labels)


def own_labels(logits, labels):
    largest = logits.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest.unsqueeze(-1)
    sums = logits.exp().sum(-1)
    dist.all_reduce(sums)
    target, mine = pick(logits, labels)
    return (sums.log() - target)[mine].mean()  # the bug: the mean over my labels


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])  # all of rank 0
    for scale in (1, 60):
        right = F.cross_entropy(logits * scale, labels)
        print(f"rank {rank}, times {scale:2}: right {right:.2f}", end="")
        for function in (without_max, own_max, own_labels):
            loss = function((logits * scale).chunk(2, 1)[rank], labels)
            print(f", {function.__name__} {loss:.2f}", end="")
        print()

    dist.barrier()
    dist.destroy_process_group()
