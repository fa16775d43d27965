# torchrun --nproc-per-node 4 snippets/lc4/wrapped_model.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
mesh = init_mesh((2, 2), ("data", "tensor"))
first = 2 * mesh["data"].get_local_rank()
config = XtrainConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
)
over_data = {
    "process_group": mesh["data"].get_group(),
    "gradient_reduction": "sum",  # the loss is divided by the global count already
}


def train(kind: str) -> float:
    """Three steps of AdamW; the loss after them."""
    bare = XtrainModel(config, mesh, dtype=torch.float64)
    model = bare
    if kind == "DDP":
        model = DistributedDataParallel(bare, **over_data)
    if kind == "FSDP":
        model = FullyShardedDataParallel(bare, blocks=[DecoderLayer], **over_data)
    if kind == "ZeRO-1":
        optimizer = ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, stage=1, lr=0.01, **over_data
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    for _ in range(3):
        tokens, labels = torch.randint(32, (2, 4, 6))
        mine = slice(first, first + 2)
        optimizer.zero_grad()
        model(tokens[mine], labels[mine]).backward()
        bare.sync_gradients(skip=() if kind == "bare" else ("data",))
        optimizer.step()
    with torch.no_grad():
        return float(model(tokens[mine], labels[mine]))


for kind in ("bare", "DDP", "ZeRO-1", "FSDP"):
    loss = train(kind)
    if dist.get_rank() == 0:
        print(f"{kind:6}: loss {loss:.10f}")

dist.destroy_process_group()
