# torchrun --nproc-per-node 4 snippets/lc4/cut_checkpoint.py
import os
import tempfile

import torch
import torch.distributed as dist

from xtrain.checkpoint import CheckpointReader, load_checkpoint, save_checkpoint
from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.zero import FullyShardedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
torch.set_default_dtype(torch.float64)
rank = dist.get_rank()
run = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(run)
tokens = torch.arange(24).view(4, 6) % 8
sizes = {
    "vocab_size": 8, "hidden_size": 5, "intermediate_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
}  # fmt: skip


def train(model, optimizer, mine=tokens) -> float:
    optimizer.zero_grad()
    loss = model(mine, mine.roll(-1, dims=1))
    loss.backward()
    getattr(model, "module", model).sync_gradients()
    optimizer.step()
    return loss.item()


# Four tensor ranks save after one step, and train on.
model = XtrainModel(XtrainConfig(**sizes), init_mesh((4,), ("tensor",)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train(model, optimizer)
path = save_checkpoint(run[0], 1, model.shards(), optimizer)
expected = [train(model, optimizer) for _ in range(3)]
if rank == 0:
    with CheckpointReader(path) as reader:
        for name in ("layers.0.self_attn.o_proj.weight", "norm.weight"):
            print(name, list(reader.about(name).shape))
            for piece in reader.stored(name):
                box = piece.boxes[0]
                print(f"  {piece.file}: {list(box.size)} at {list(box.offset)}")

# The same four as two data ranks of two tensor ranks, from other weights.
mesh = init_mesh((2, 2), ("data", "tensor"))
cut, group = XtrainModel(XtrainConfig(**sizes, seed=9), mesh), mesh["data"].get_group()
model = FullyShardedDataParallel(cut, group, gradient_reduction="sum")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
step, _ = model.load_sharded(run[0], optimizer)
mine = tokens.chunk(2)[group.rank()]
found = [train(model, optimizer, mine) for _ in range(3)]
same = all(abs(a / b - 1) < 1e-12 for a, b in zip(found, expected, strict=True))
print(f"rank {rank}: from step {step} on under FSDP, same three losses: {same}")
whole = XtrainModel(XtrainConfig(**sizes, seed=9))  # as without any other rank
load_checkpoint(run[0], whole.shards())
loss = whole.loss(tokens, tokens.roll(-1, dims=1)).item()
print(f"rank {rank}: whole, same loss: {abs(loss / expected[0] - 1) < 1e-12}")
dist.destroy_process_group()
