"""The spine's run under the wrappers of lc2, on every rank."""

from typing import Any

import torch

from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel

from ...spine.training import ADAMW, Training, clip, new_model, run


def curve(wrapper: str) -> dict[str, Any]:
    """Losses and gradient norms of the run.

    Args:
        wrapper: "naive", "ddp", or "no_sync", which is DDP with two micro-batches.
    """
    return run(trained_by(wrapper))


def trained_by(wrapper: str) -> Training:
    """The model in its wrapper, with gradients summed over the ranks."""
    if wrapper == "naive":
        naive = NaiveDataParallel(new_model(), gradient_reduction="sum")
        optimizer = torch.optim.AdamW(naive.parameters(), **ADAMW)
        return Training(naive, optimizer, clip(naive), naive.reduce_gradients)
    model = DistributedDataParallel(
        new_model(), bucket_cap_mb=0.02, gradient_reduction="sum"
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    parts = 2 if wrapper == "no_sync" else 1
    return Training(model, optimizer, clip(model), micro_batches=parts)
