# torchrun --nproc-per-node 2 snippets/lc4/hugging_face.py
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel, load_hf, save_hf

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
mesh = init_mesh((2,), ("tensor",))

folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
theirs, ours = Path(folder[0], "theirs"), Path(folder[0], "ours")
if rank == 0:  # in place of a download: several files in bfloat16
    config = XtrainConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    save_hf(XtrainModel(config, dtype=torch.bfloat16), theirs, max_file_bytes=5000)
    print("\n".join(sorted(path.name for path in theirs.iterdir())))
dist.barrier()

model = load_hf(theirs, mesh)  # each rank reads its own slices
for name in ("embed_tokens", "layers.0.self_attn.k_proj", "layers.0.mlp.down_proj"):
    weight = model.get_parameter(f"{name}.weight")
    whole = model.placement(f"{name}.weight").full_shape(weight)
    print(f"rank {rank}: {name} {list(weight.shape)} of {whole}, {weight.dtype}")
held = sum(parameter.nbytes for parameter in model.parameters())
there = sum(path.stat().st_size for path in theirs.glob("*.safetensors"))
print(f"rank {rank}: holds {held} bytes of files of {there}")

save_hf(model, ours, max_file_bytes=5000)  # all ranks together


def tensors_of(directory: Path) -> dict:
    """All tensors of a checkpoint, whatever its files."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


if rank == 0:
    before, after = tensors_of(theirs), tensors_of(ours)
    same = all(torch.equal(before[name], after[name]) for name in before)
    print(f"rank 0: {len(after)} tensors come back, bit for bit: {same}")

dist.destroy_process_group()
