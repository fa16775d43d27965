"""Functions that run on every rank for the page on stages."""

from typing import Any

import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.schedules import SCHEDULES


def stages_held(schedule: str, preset: str) -> list[dict[str, Any]]:
    """This rank's virtual stages of a published shape, made but not filled."""
    ranks = dist.get_world_size()
    mesh = init_mesh((ranks,), ("pipeline",))
    made = SCHEDULES[schedule](ranks, 2 * ranks)
    config = XtrainConfig.preset(preset)
    return [
        {
            "stage": stage.index,
            "parts": [stage.module.span.start, stage.module.span.stop],
            "parameters": sum(p.numel() for p in stage.parameters()),
        }
        for stage in XtrainModel.stages(config, mesh, made, device="meta")
    ]
