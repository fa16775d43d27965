"""Functions that run on every rank for the page on checkpoints of a cut model."""

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.checkpoint import CheckpointReader, save_checkpoint
from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.zero import FullyShardedDataParallel, clip_sharded_grad_norm_

CONFIG = XtrainConfig(
    vocab_size=8,
    hidden_size=5,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    initializer_range=0.4,
)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.arange(24).view(4, 6) % CONFIG.vocab_size
    return tokens, tokens.roll(-1, dims=1)


def saved_pieces(data: int) -> dict[str, Any]:
    """The index of a checkpoint after one step, saved on `data` ranks and the rest.

    For each tensor its shape and its pieces, [offset, size, number of the file]: of the
    weights and of the moments, without step counts and random states.
    """
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    mesh = init_mesh((data, dist.get_world_size() // data), ("data", "tensor"))
    bare = XtrainModel(CONFIG, mesh)
    model: nn.Module = bare
    if data > 1:
        group = mesh["data"].get_group()
        model = FullyShardedDataParallel(bare, group, gradient_reduction="sum")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, labels = batch()
    here = mesh["data"].get_local_rank()
    model(tokens.chunk(data)[here], labels.chunk(data)[here]).backward()
    optimizer.step()
    if isinstance(model, FullyShardedDataParallel):
        path = model.save_sharded(folder[0], 1, optimizer)
    else:
        path = save_checkpoint(folder[0], 1, bare.shards(), optimizer)
    with CheckpointReader(path) as reader:
        found = {
            name: {
                "shape": list(reader.about(name).shape),
                "pieces": [
                    [list(box.offset), list(box.size), int(stored.file[5:10])]
                    for stored in reader.stored(name)
                    for box in stored.boxes
                ],
            }
            for name in reader.tensors
            if not name.startswith((":random:", ":number:"))
        }
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


def norms() -> dict[str, float]:
    """The gradients' norm of one model, computed in right and in wrong ways."""
    whole = XtrainModel(CONFIG, dtype=torch.float64)
    size = dist.get_world_size()
    cut = XtrainModel(CONFIG, init_mesh((size,), ("tensor",)), dtype=torch.float64)
    for model in (whole, cut):
        model.loss(*batch()).backward()
    slices = [p.grad for p in cut.parameters() if p.grad is not None]
    right = nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    return {
        "right": right.item(),
        "own": nn.utils.get_total_norm(slices).item(),
        "replicas": clip_sharded_grad_norm_(slices, 1e9).item(),
        "ours": cut.clip_grad_norm_(1e9).item(),
    }


def parameters() -> int:
    """How many the full model has."""
    return sum(p.numel() for p in XtrainModel(CONFIG, device="meta").parameters())


def held() -> int:
    """How many this rank has of a model that is cut over all ranks."""
    mesh = init_mesh((dist.get_world_size(),), ("tensor",))
    return sum(p.numel() for p in XtrainModel(CONFIG, mesh).parameters())
