"""The spine's run with experts in place of MLPs, on every rank."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.model.mesh_axes import batch_group
from xtrain.zero import FullyShardedDataParallel

from ...spine.training import ADAMW, CONFIG, Training, run

AXES = ("expert_data", "expert", "tensor")
EXPERTS = replace(
    CONFIG,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    router_aux_loss_coef=0.02,
)


def curve(layout: str) -> dict[str, Any]:
    """Losses and gradient norms of the run.

    Args:
        layout: "one process"; "expert" over all ranks; or "replicas", "tensor" or
            "fsdp", which put two expert ranks beside two replicas, two tensor ranks, or
            two replicas under FSDP.
    """
    return run(trained_by(layout))


def trained_by(layout: str) -> Training:
    """The model with its experts on ranks, and gradients summed over all of them."""
    size = dist.get_world_size()
    shapes = {
        "one process": (1, 1, 1),
        "expert": (1, size, 1),
        "tensor": (1, size // 2, 2),
    }
    mesh = init_mesh(shapes.get(layout, (2, size // 2, 1)), AXES)
    whole = XtrainModel(EXPERTS, mesh, dtype=torch.float64)
    model: Any = whole
    skip: tuple[str, ...] = ()
    if layout == "fsdp":
        group = mesh["expert_data"].get_group()
        model = FullyShardedDataParallel(
            whole, group, blocks=[DecoderLayer], gradient_reduction="sum"
        )
        skip = ("expert_data",)
    return Training(
        model,
        torch.optim.AdamW(model.parameters(), **ADAMW),
        model.clip_grad_norm_,
        reduce=lambda: whole.sync_gradients(skip=skip),
        data=batch_group(mesh),
        mean_of_all=True,
    )
