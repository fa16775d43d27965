# torchrun --nproc-per-node 2 snippets/lc2/train.py
import os
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedDataParallel, DistributedSampler

SENTENCES = torch.arange(24 * 8).view(24, 8) * 7919 % 11 + 1  # tokens 1 to 11
SENTENCES[torch.arange(8) > 1 + torch.arange(24).view(24, 1) % 7] = 0  # 2 to 8 of them


def train(epochs: int, file: Path, batch_size: int = 6, micro_batch_size: int = 3):
    """The loss of each epoch, and the model. Goes on from `file` if it is there."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12)).double()
    model = DistributedDataParallel(net, gradient_reduction="sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler, losses = DistributedSampler(SENTENCES), []
    loader = torch.utils.data.DataLoader(SENTENCES, batch_size, sampler=sampler)
    summed = nn.CrossEntropyLoss(ignore_index=0, reduction="sum")
    if file.exists():
        weights, state, losses = torch.load(file, map_location="cpu")
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for epoch in range(len(losses), epochs):
        sampler.set_epoch(epoch)  # or every epoch has the same order
        total = torch.zeros(2).double()  # this rank's loss and tokens in this epoch
        for batch in loader:
            batch = batch.to(total.device)
            tokens = (batch[:, 1:] > 0).sum()
            total[1] += tokens
            dist.all_reduce(tokens)  # of all ranks in this step, before any backward
            for part in (parts := batch.split(micro_batch_size)):
                with nullcontext() if part is parts[-1] else model.no_sync():
                    loss = summed(model(part[:, :-1]).mT, part[:, 1:])
                    (loss / tokens).backward()  # a sum, divided once by all tokens
                total[0] += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # the same on all ranks
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(total)  # the epoch's loss is not a mean of means
        losses.append((total[0] / total[1]).item())
        if dist.get_rank() == 0:  # all ranks have the same state: one of them writes
            torch.save((model.state_dict(), optimizer.state_dict(), losses), f"{file}_")
            Path(f"{file}_").rename(file)  # it is there whole, or not at all
        dist.barrier()  # no rank reads before it is written
    return losses, net


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    dist.broadcast_object_list(folder := [mkdtemp()])  # rank 0's
    whole, _ = train(4, Path(folder[0], "whole"))
    train(2, Path(folder[0], "stopped"))  # here the job ends, and is started again
    resumed, _ = train(4, Path(folder[0], "stopped"))
    print("loss by epoch:", *(f"{x:.4f}" for x in whole), "resumed:", resumed == whole)
    dist.destroy_process_group()
