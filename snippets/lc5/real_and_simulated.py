# torchrun --nproc-per-node 2 snippets/lc5/real_and_simulated.py
import json

import torch
import torch.distributed as dist
from torch import nn

from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import simulate, zb_h1
from xtrain.schedules.chrome_trace import chrome_trace, timeline_of

dist.init_process_group("gloo")
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

every = [None, None]
dist.all_gather_object(every, (runner.executed, runner.times))
if rank == 0:
    executed, times = zip(*every, strict=True)
    real = timeline_of(schedule, executed, times, messages=True)
    trace = json.loads(chrome_trace({"real": real, "simulated": simulated}))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for process, name in enumerate(("real", "simulated")):
        print(f"{name}: {sum(e['pid'] == process for e in slices)} slices")

dist.barrier()
dist.destroy_process_group()
