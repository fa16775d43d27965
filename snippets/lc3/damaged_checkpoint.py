# torchrun --nproc-per-node 2 snippets/lc3/damaged_checkpoint.py
import os
import tempfile
from textwrap import fill

import torch
import torch.distributed as dist
from torch import nn

from xtrain.checkpoint import CheckpointError
from xtrain.zero import FullyShardedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)


def build(width: int) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(nn.Sequential(nn.Linear(8, width)))


def load(model) -> None:
    try:
        model.load_sharded(folder[0])
    except CheckpointError as error:
        for line in f"rank {rank}: {error}".replace(folder[0], "run").splitlines():
            print(fill(line, 80, subsequent_indent="    "))


path = build(width=8).save_sharded(folder[0], step=7)
load(build(width=9))  # another model

if rank == 0:  # flip one bit of rank 1's file, in the first byte behind its header
    file = path / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    file.write_bytes(content)
dist.barrier()
load(build(width=8))

dist.barrier()
dist.destroy_process_group()
