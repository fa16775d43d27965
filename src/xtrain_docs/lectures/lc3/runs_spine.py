"""The spine's run under the stages of ZeRO, on every rank."""

from typing import Any

import torch

from xtrain.zero import AdamW, FullyShardedDataParallel, ZeroOptimizer

from ...spine.training import ADAMW, Training, new_model, run


def curve(stage: str) -> dict[str, Any]:
    """Losses and gradient norms of the run.

    Args:
        stage: "1", "2", "3", or "3 bf16": fp32 shards, computed with in bfloat16.
    """
    return run(trained_by(stage))


def trained_by(stage: str) -> Training:
    """The model and its sharded optimizer, with gradients summed over the ranks."""
    if stage in ("1", "2"):
        model = new_model()
        zero = ZeroOptimizer(
            model.parameters(),
            AdamW,
            stage=int(stage),
            bucket_cap_mb=0.02,
            gradient_reduction="sum",
            **ADAMW,
        )
        return Training(model, zero, zero.clip_grad_norm_)
    bf16 = stage == "3 bf16"
    sharded = FullyShardedDataParallel(
        new_model(torch.float32 if bf16 else torch.float64),
        compute_dtype=torch.bfloat16 if bf16 else None,
        gradient_reduction="sum",
    )
    optimizer = AdamW(sharded.parameters(), **ADAMW)
    return Training(sharded, optimizer, sharded.clip_grad_norm_, exact=not bf16)
