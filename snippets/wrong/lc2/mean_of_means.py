# torchrun --nproc-per-node 2 snippets/wrong/lc2/mean_of_means.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def backward(model, tokens, labels):
    """Meant: the gradient of the mean over all tokens of all ranks."""
    loss = F.cross_entropy(model(tokens), labels)  # the bug: mean of *my* tokens
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())
    return loss


def train(backward, tokens, labels):
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _step in range(40):
        optimizer.zero_grad()
        backward(model, tokens, labels)
        optimizer.step()
    return model


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    tokens = torch.randn(2, 40, 4).double()  # 40 for each rank
    labels = torch.randint(3, (2, 40))
    labels[1, 4:] = -100  # rank 1 has a short text: 4 tokens, and padding
    whole = tokens.flatten(0, 1), labels.flatten()

    alone = train(lambda m, x, y: F.cross_entropy(m(x), y).backward(), *whole)
    model = train(backward, tokens[rank], labels[rank])
    if rank == 0:
        for name, trained in (("one process", alone), ("mean of means", model)):
            loss = F.cross_entropy(trained(whole[0]), whole[1])
            print(f"{name}: loss over all 44 tokens {loss.item():.4f}")
    labels[1] = -100  # and now rank 1 has no tokens at all
    loss = backward(model, tokens[rank], labels[rank])
    gradient = model.weight.grad.norm().item()
    print(f"rank {rank}, nothing but padding on rank 1: "
          f"loss {loss.item():.4f}, gradient {gradient:.4f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
