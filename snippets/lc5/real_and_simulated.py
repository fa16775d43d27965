# torchrun --nproc-per-node 2 snippets/lc5/real_and_simulated.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import simulate, zb_h1

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
schedule = zb_h1(2, 3)
simulated = simulate(schedule)

stage = PipelineStage(nn.Linear(4, 4), rank, 2)
runner = PipelineRunner(
    stage, schedule, lambda y, target: ((y - target).square().sum(), target.numel())
)
batch = torch.ones(3, 4)
runner.step(batch, batch)

computed = [str(action) for action in runner.executed if action.kind in "FBW"]
print(f"rank {rank} computed {' '.join(computed)}")
held, expected = runner.peak_activations, simulated.peak_activations[rank]
print(f"rank {rank} held {held:g} micro-batches, simulated {expected:g}")

dist.destroy_process_group()
