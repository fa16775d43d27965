# torchrun --nproc-per-node 3 snippets/lc5/runner.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import one_f_one_b

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same model and batch everywhere, to compare
layers = [nn.Embedding(50, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 50)]
model = nn.Sequential(*layers).double()
tokens, labels = torch.randint(50, (2, 10, 7))
labels[3, 2:] = -100  # rows of different lengths

schedule = one_f_one_b(ranks, micro_batches=4)
cut = {0: model[:1], 1: model[1:3], 2: model[3:]}
stage = PipelineStage(cut[rank], rank, ranks)


def loss_fn(logits, labels):
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


runner = PipelineRunner(stage, schedule, loss_fn)
optimizer = torch.optim.SGD(runner.parameters, lr=1.0)
for step in range(3):
    optimizer.zero_grad()
    loss = runner.step(
        tokens if rank == 0 else None,  # who does not need it may pass None
        labels if rank == ranks - 1 else None,
    )
    optimizer.step()
    if rank == 1:
        print(f"step {step}: loss {loss:.6f} on every rank")

if rank == 1:
    print("in order:", *runner.executed[:8], "...")
    print("held at most", f"{runner.peak_activations:g} of 4 micro-batches")

torch.manual_seed(0)  # one process
layers = [nn.Embedding(50, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 50)]
dense = nn.Sequential(*layers).double()
optimizer = torch.optim.SGD(dense.parameters(), lr=1.0)
for _ in range(3):
    optimizer.zero_grad()
    total, count = loss_fn(dense(tokens), labels)
    (total / count).backward()
    optimizer.step()
own = {0: dense[:1], 1: dense[1:3], 2: dense[3:]}[rank]
pairs = zip(stage.module.parameters(), own.parameters(), strict=True)
same = all(torch.allclose(ours, theirs) for ours, theirs in pairs)
print(f"rank {rank}: the weights of one process after 3 steps: {same}")
dist.destroy_process_group()
