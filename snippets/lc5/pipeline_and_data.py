# torchrun --nproc-per-node 4 snippets/lc5/pipeline_and_data.py
import gc
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel, clip_stages_grad_norm_
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import one_f_one_b

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
config = XtrainConfig(**sizes, num_hidden_layers=4, num_attention_heads=4)
schedule = one_f_one_b(2, 4)
torch.manual_seed(0)
batches = torch.randint(32, (3, 2, 16, 6))  # three of tokens and labels
for row in range(16):
    batches[:, 1, row, : row // 3] = -100  # later rows have fewer labels that count


def train_on_a_mesh():
    """Loss and norm of the last step. What holds the groups ends with the function."""
    mesh = init_mesh((2, 2), ("pipeline", "data"))
    pipeline, data = mesh["pipeline"].get_group(), mesh["data"].get_group()
    stages = XtrainModel.stages(config, mesh, schedule, dtype=torch.float64)
    loss_fn = stages[-1].module.loss_fn
    for stage in stages:
        stage.module = DistributedDataParallel(
            stage.module, process_group=data, gradient_reduction="sum"
        )
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    runner = PipelineRunner(stages, schedule, loss_fn, pipeline, data_group=data)
    for tokens, labels in batches[:, :, data.rank() :: 2]:  # every other row
        optimizer.zero_grad()
        loss = runner.step(tokens, labels)
        norm = clip_stages_grad_norm_(stages, 0.5)
        optimizer.step()
    return loss, norm


loss, norm = train_on_a_mesh()
if dist.get_rank() == 0:
    print(f"2 x 2 ranks  loss {loss:.10f}, norm {norm:.10f}")
    model = XtrainModel(config, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for tokens, labels in batches:
        optimizer.zero_grad()
        loss = model.loss(tokens, labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    print(f"one process  loss {loss:.10f}, norm {norm:.10f}")
gc.collect()  # runner, wrappers and mesh refer to one another
dist.barrier()
dist.destroy_process_group()
