# torchrun --nproc-per-node 4 snippets/lc5/stages_checkpoint.py
import os
import tempfile

import torch
import torch.distributed as dist

from xtrain.checkpoint import load_checkpoint, save_checkpoint
from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.schedules import dualpipe, interleaved

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
run = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(run)
sizes = {
    "vocab_size": 12, "hidden_size": 6, "intermediate_size": 8, "num_hidden_layers": 4,
    "num_attention_heads": 2, "head_dim": 2,
}  # fmt: skip


def shards(stages):
    return [shard for stage in stages for shard in stage.module.shards()]


# Two pipeline ranks with two chunks each, over two tensor ranks, save.
mesh = init_mesh((2, 2), ("pipeline", "tensor"))
stages = XtrainModel.stages(XtrainConfig(**sizes), mesh, interleaved(2, 4))
path = save_checkpoint(run[0], 1, shards(stages))

# Four ranks that hold every stage twice load, and begin with other weights.
mesh = init_mesh((4,), ("pipeline",))
stages = XtrainModel.stages(XtrainConfig(**sizes, seed=9), mesh, dualpipe(4, 8))
load_checkpoint(path, shards(stages))
whole = XtrainModel(XtrainConfig(**sizes))
for stage in stages:
    for name, parameter in stage.module.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))
    print(f"rank {rank}: stage {stage.index} is that of the whole model")

# And so does a single model.
alone = XtrainModel(XtrainConfig(**sizes, seed=9))
load_checkpoint(path, alone.shards())
same = all(map(torch.equal, alone.parameters(), whole.parameters()))
print(f"rank {rank}: alone, the same weights: {same}")
dist.destroy_process_group()
