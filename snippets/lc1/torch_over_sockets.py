# torchrun --nproc-per-node 2 snippets/lc1/torch_over_sockets.py
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor

from xtrain import backends

torch.set_num_threads(1)
backends.register()
dist.init_process_group("xtrain-socket")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))

# FSDP2: all-gather in the forward pass, reduce-scatter in the backward pass.
torch.manual_seed(0)
model = torch.nn.Linear(4, 2, bias=False)
whole = model.weight.detach().clone()
fully_shard(model, mesh=mesh)
model(torch.full((1, 4), rank + 1.0)).sum().backward()
shard = model.weight.grad
print(f"rank {rank} holds {list(shard.to_local().shape)} of a [2, 4] gradient,")
print(f"  the mean over both ranks: {shard.full_tensor().unique().tolist()}")

# DTensor: a matrix product over a sharded dimension ends in an all-reduce.
left = distribute_tensor(whole, mesh, [Shard(1)])
column = torch.arange(4.0).view(4, 1)
right = distribute_tensor(column, mesh, [Shard(0)])
product = (left @ right).full_tensor()
print(f"  DTensor agrees with one process: {torch.allclose(product, whole @ column)}")

# Pipelining: stage 0 sends its activations to stage 1.
stage = PipelineStage(
    torch.nn.Linear(4, 4, bias=False), rank, size, torch.device("cpu")
)
schedule = ScheduleGPipe(stage, n_microbatches=2)
given = (torch.ones(6, 4),) if rank == 0 else ()
output = schedule.step(*given)
result = None if output is None else list(output.shape)
print(f"  pipeline stage {rank} returned {result}")
dist.destroy_process_group()
