"""The features of the support matrix: each changes how a training run is set up."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from xtrain.comm.collective_choice import RING
from xtrain.pipeline_parallel import checkpoint

from .setup import Setup


@dataclass(frozen=True)
class Feature:
    """A row and a column of the matrix.

    Attributes:
        name: short, as in test ids.
        axis: two features of the same axis are alternatives, never a pair.
        title: as the page names it, Markdown.
        change: fields of the Setup; `model` and `options` add to what is there.
    """

    name: str
    axis: str
    title: str
    change: dict[str, Any]


WRAPPERS = {
    "naive": "`NaiveDataParallel`",
    "ddp": "`DistributedDataParallel`",
    "zero1": "`ZeroOptimizer`, stage 1",
    "zero2": "`ZeroOptimizer`, stage 2",
    "fsdp": "`FullyShardedDataParallel`",
    "fsdp_kept": "`FullyShardedDataParallel`, `reshard_after_forward=False`",
}
FEATURES: dict[str, Feature] = {}
INNER = "inner"  # the axis of wrappers that are there already
SCHEDULED = {
    "gpipe": "GPipe",
    "interleaved_1f1b": "interleaved 1F1B",
    "zb_h1": "ZB-H1",
    "zb_v": "ZB-V",
    "dualpipe": "DualPipe",
    "dualpipe_v": "DualPipeV",
}


def feature(name: str, axis: str, title: str, **change: Any) -> None:
    """Add a row."""
    FEATURES[name] = Feature(name, axis, title, change)


def prepare(case: tuple[str, ...]) -> Setup:
    """The setup of a case: a wrapper and its features."""
    wrapper, *names = case
    setup = Setup(wrapper)
    for name in names:
        for field, new in FEATURES[name].change.items():
            if field in ("model", "options"):
                getattr(setup, field).update(new)
            else:
                setattr(setup, field, new)
    if setup.leave_out and wrapper == "ddp":
        setup.options["find_unused_parameters"] = True
    return setup


# Other numbers of ranks come first: a test runs a feature with all later ones.
TENSOR: dict[str, Any] = {"ranks": 4, "tensor": 2, "model": {"inner": 10}}
PIPELINE: dict[str, Any] = {
    "ranks": 4, "pipeline": 2, "micro_batches": 4,
    "options": {"gradient_reduction": "sum"},
}  # fmt: skip
feature("one_rank", "ranks", "one rank", ranks=1)
feature("three_ranks", "ranks", "three ranks", ranks=3)
feature("sub_groups", "ranks", "two groups, side by side", ranks=4, subgroups=2)
feature("tensor", "ranks", "two data ranks of two tensor ranks", **TENSOR)
feature("sequence_parallel", "ranks",
        "two data ranks of two tensor ranks, sequence parallel",
        **TENSOR, sequence_parallel=True, length=6)  # fmt: skip
feature("pipeline", "ranks", "two pipelines of two stages, 1F1B",
        **PIPELINE, schedule="one_f_one_b")  # fmt: skip
for name, title in SCHEDULED.items():
    feature(name, "ranks", f"two pipelines, {title}",
            **PIPELINE, schedule=name.removesuffix("_1f1b"))  # fmt: skip

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
feature("fp32", "precision", "fp32 weights", dtype=FP32, tolerance=1e-4)
feature("bf16", "precision", "bf16 weights, fp32 masters",
        dtype=FP32, low=BF16, tolerance=0.25)  # fmt: skip
feature("loss_scaler", "precision", "fp16 weights, fp32 masters, `LossScaler`",
        dtype=FP32, low=FP16, tolerance=0.1, scaler="LossScaler")  # fmt: skip
feature("autocast", "precision", "fp32 weights, `autocast` to bf16",
        dtype=FP32, autocast=BF16, tolerance=0.1)  # fmt: skip
feature("grad_scaler", "precision", "fp32 weights, `autocast` to fp16, `GradScaler`",
        dtype=FP32, autocast=FP16, tolerance=0.1, scaler="GradScaler")  # fmt: skip

feature("accumulate", "accumulation", "two micro-batches", micro_batches=2)
feature("no_sync", "accumulation", "two micro-batches, the first in `no_sync()`",
        micro_batches=2, quiet=True)  # fmt: skip
feature("reduce_gradients", "accumulation",
        "all in `no_sync()`, then `reduce_gradients()`",
        micro_batches=2, by_hand=True)  # fmt: skip
feature("interleaved", "order", "forwards ahead of backwards, `F0 F1 B0 F2 B1 B2`",
        micro_batches=3, interleaved=True)  # fmt: skip
for name, reentrant in (("recompute", False), ("reentrant", True)):
    again = partial(torch_checkpoint, use_reentrant=reentrant)
    feature(name, "recompute", f"torch's `checkpoint(use_reentrant={reentrant})`",
            model={"recompute": again})  # fmt: skip
feature("own_recompute", "recompute", "`checkpoint` of `xtrain.pipeline_parallel`",
        model={"recompute": checkpoint})  # fmt: skip
feature("clip", "clipping", "clip the gradients' norm", max_norm=0.3)
feature("sum_gradients", "reduction", '`gradient_reduction="sum"`',
        options={"gradient_reduction": "sum"})  # fmt: skip
feature("ring", "collectives", "`collectives=RING`", options={"collectives": RING})
feature("adamw", "optimizer", "`AdamW`", optimizer_class=torch.optim.AdamW,
        defaults={"lr": 0.05, "eps": 0.01, "weight_decay": 0.1})  # fmt: skip
feature("offload", "offload", "`offload=True`", options={"offload": True})
feature("tied", "tied", "tied weights", model={"tied": True})
feature("frozen", "frozen", "frozen parameters", model={"frozen": True})
feature("unused", "unused", "parameters unused on some ranks",
        model={"gated": True}, leave_out=True)  # fmt: skip
feature("meta", "meta", "built on the meta device", meta=True)
feature("join", "inputs", "uneven inputs, `join()`", uneven=True)

# The module has a wrapper already.
for name in ("naive", "ddp", "zero1", "fsdp"):
    title = WRAPPERS[name].removesuffix(", stage 1")
    feature(f"around_{name}", INNER, f"around {title}", inner=name)
feature(
    "around_torch", INNER, "around torch's `DistributedDataParallel`", inner="torch"
)
