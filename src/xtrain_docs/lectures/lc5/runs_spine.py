"""The spine's run in stages, on pipeline and data ranks, on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainModel, clip_stages_grad_norm_
from xtrain.model.layer import DecoderLayer
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

from ...spine.training import ADAMW, CONFIG, IGNORED, Training, run

MICRO_BATCHES = 4


def curve(layout: str) -> dict[str, Any]:
    """Losses and gradient norms of the run.

    Args:
        layout: a schedule over all ranks; or, with "ddp", "zero 2" or "fsdp" before it,
            a schedule over half of them, each of which has two data ranks.
    """
    return run(trained_by(layout))


def trained_by(layout: str) -> Training:
    """This rank's stages under their wrapper, and a runner."""
    wrapper, _, name = layout.rpartition(" ")
    data = 2 if wrapper else 1
    mesh = init_mesh((dist.get_world_size() // data, data), ("pipeline", "data"))
    ranks, group = mesh["pipeline"].size(), mesh["data"].get_group()
    schedule = SCHEDULES[name](ranks, MICRO_BATCHES)
    stages = XtrainModel.stages(CONFIG, mesh, schedule, dtype=torch.float64)
    loss_fn = stages[0].module.loss_fn
    over_data: dict[str, Any] = {"process_group": group, "gradient_reduction": "sum"}
    for stage in stages:
        if wrapper == "ddp":
            stage.module = DistributedDataParallel(stage.module, **over_data)
        if wrapper == "fsdp":
            stage.module = FullyShardedDataParallel(
                stage.module, blocks=[DecoderLayer], **over_data
            )
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    if wrapper == "zero 2":
        optimizer = zero = ZeroOptimizer(
            parameters, torch.optim.AdamW, stage=2, **over_data, **ADAMW
        )
        for stage in stages:
            stage.reduction = zero
    runner = PipelineRunner(
        stages, schedule, loss_fn, mesh["pipeline"].get_group(), data_group=group
    )
    return Training(
        stages,
        optimizer,
        lambda norm: clip_stages_grad_norm_(stages, norm),
        data=group,
        whole_step=lambda *batch: runner.step(
            *map(with_more_rows, batch, (0, IGNORED))
        ),
    )


def with_more_rows(rows: Tensor, value: int) -> Tensor:
    """At least one row for each micro-batch; labels of the added ones do not count."""
    return pad(rows, (0, 0, 0, max(MICRO_BATCHES - len(rows), 0)), value=value)
