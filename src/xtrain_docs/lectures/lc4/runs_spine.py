"""The spine's run on a mesh of data and tensor ranks, on every rank."""

from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

from ...spine.training import ADAMW, CONFIG, Training, run


def curve(layout: str) -> dict[str, Any]:
    """Losses and gradient norms of the run.

    Args:
        layout: "tensor" or "sequence", which cut the model over all ranks; or two data
            ranks whose gradients "ddp", "zero 1" or "fsdp" sums, the others tensor.
    """
    return run(trained_by(layout))


def trained_by(layout: str) -> Training:
    """The cut model under its wrapper, with gradients summed over the data ranks."""
    data = 1 if layout in ("tensor", "sequence") else 2
    mesh = init_mesh((data, dist.get_world_size() // data), ("data", "tensor"))
    cut = XtrainModel(
        CONFIG, mesh, sequence_parallel=layout == "sequence", dtype=torch.float64
    )
    group = mesh["data"].get_group()
    options: dict[str, Any] = {"process_group": group, "gradient_reduction": "sum"}
    shared: dict[str, Any] = {
        "reduce": lambda: cut.sync_gradients(skip=("data",)),
        "data": group,
        "mean_of_all": True,
    }
    model: Any = cut
    if layout == "zero 1":
        zero = ZeroOptimizer(
            cut.parameters(), torch.optim.AdamW, stage=1, **options, **ADAMW
        )
        return Training(cut, zero, lambda n: zero.clip_grad_norm_(n, cut), **shared)
    if layout == "ddp":
        model = DistributedDataParallel(cut, bucket_cap_mb=0.02, **options)
    if layout == "fsdp":
        model = FullyShardedDataParallel(cut, blocks=[DecoderLayer], **options)
    clip = model.clip_grad_norm_ if layout == "fsdp" else cut.clip_grad_norm_
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Training(model, optimizer, clip, **shared)
