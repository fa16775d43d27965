# torchrun --nproc-per-node 4 snippets/lc3/load_pretrained.py
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from xtrain.zero import FullyShardedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])


def write_safetensors(path: Path, state: dict) -> None:
    """The format: the length of a header, the header, the bytes of the tensors."""
    header, data = {}, b""
    for name, tensor in state.items():
        raw = tensor.cpu().numpy().tobytes()
        place = [len(data), len(data) + len(raw)]
        shape = list(tensor.shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": place}
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
path = Path(folder[0], "model.safetensors")
if rank == 0:  # anybody's file of a whole model
    write_safetensors(path, net().state_dict())
dist.barrier()

with torch.device("meta"):  # shapes and dtypes, and no memory at all
    bare = net()
print(f"rank {rank}: on {next(bare.parameters()).device}, no bytes yet")
model = FullyShardedDataParallel(bare, blocks=[nn.Linear])
model.load_full(path)  # each rank reads its own ranges
held = sum(piece.nbytes for piece in model.parameters())
print(f"rank {rank}: {held} of {path.stat().st_size} bytes of the file held")

x = torch.ones(2, 64)
print(f"rank {rank}: the model of the file: {torch.equal(model(x), net()(x))}")

dist.barrier()
dist.destroy_process_group()
