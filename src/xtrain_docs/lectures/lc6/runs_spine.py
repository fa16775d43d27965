"""The spine's run on meshes with context ranks, on every rank."""

from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.zero import FullyShardedDataParallel

from ...spine.training import ADAMW, CONFIG, Training, run

AXES = ("data", "context", "tensor")


def curve(layout: str) -> dict[str, Any]:
    """Losses and gradient norms of the run.

    Args:
        layout: "ring", "all_gather" or "ulysses" over all ranks; or "tensor" or "fsdp",
            which put a ring of half of them beside two tensor or two data ranks.
    """
    return run(trained_by(layout))


def trained_by(layout: str) -> Training:
    """The model with cut sequences, and gradients summed over the context ranks."""
    half = dist.get_world_size() // 2
    beside = {"tensor": (1, half, 2), "fsdp": (2, half, 1)}
    mesh = init_mesh(beside.get(layout, (1, 2 * half, 1)), AXES)
    cut = XtrainModel(
        CONFIG,
        mesh,
        context_attention="ring" if layout in beside else layout,
        dtype=torch.float64,
    )
    model: Any = cut
    group = mesh["data"].get_group()
    if layout == "fsdp":
        model = FullyShardedDataParallel(
            cut, group, blocks=[DecoderLayer], gradient_reduction="sum"
        )
    return Training(
        model,
        torch.optim.AdamW(model.parameters(), **ADAMW),
        model.clip_grad_norm_,
        reduce=lambda: cut.sync_gradients(skip=("data",)),
        data=group,
        mean_of_all=True,
    )
