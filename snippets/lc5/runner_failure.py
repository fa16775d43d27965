# torchrun --nproc-per-node 3 snippets/lc5/runner_failure.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import one_f_one_b

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)


class Layer(nn.Linear):
    """Does not like large numbers."""

    def forward(self, x):
        if x.abs().max() > 100:
            raise ArithmeticError("an activation is above 100")
        return super().forward(x)


def loss_fn(output, target):
    return (output - target).square().sum(), output.numel()


stage = PipelineStage(Layer(4, 4), rank, ranks)
runner = PipelineRunner(stage, one_f_one_b(ranks, micro_batches=4), loss_fn)
inputs = torch.ones(8, 4)
runner.step(inputs, inputs)

for bad in (torch.ones(3, 4), torch.ones(8, 4).index_fill(0, torch.tensor(5), 300.0)):
    try:
        runner.step(bad, torch.zeros_like(bad))
    except (ValueError, RuntimeError) as error:
        print(f"rank {rank}, {type(error).__name__}: {error}")
    dist.barrier()

loss = runner.step(inputs, inputs)
print(f"rank {rank}: the next step works")
dist.destroy_process_group()
