"""The spine's run under the wrappers and layouts of each lecture, on every rank."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from xtrain.comm import init_mesh
from xtrain.data_parallel import NaiveDataParallel
from xtrain.model import XtrainModel
from xtrain.schedules import SCHEDULES
from xtrain.train import accumulate, clip_grad_norm, wrap
from xtrain.zero import AdamW

from .reference import RANKS
from .training import ADAMW, CONFIG, IGNORED, Training, clip, run

MICRO_BATCHES = 4
"""Of a pipeline's step."""
BUCKET_MB = 0.02
EXPERTS = replace(
    CONFIG,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    router_aux_loss_coef=0.02,
)


@dataclass(frozen=True)
class Layout:
    """How ranks share the model and its batches.

    Attributes:
        wrapper: over the data ranks; "naive", or a kind of `xtrain.train.wrap`.
        axes: of the mesh with their sizes, 0 for the ranks that are left.
        schedule: of a pipeline.
        model: options of XtrainModel.
    """

    wrapper: str = "none"
    axes: dict[str, int] = field(default_factory=lambda: {"data": 0})
    schedule: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    bf16: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """World sizes on which it can run: with two axes four ranks at least."""
        return RANKS[1:] if 2 in self.axes.values() else RANKS


LAYOUTS: dict[str, dict[str, Layout]] = {
    "lc2": {
        "naive": Layout("naive"),
        "DDP": Layout("ddp"),
        "DDP, two micro-batches": Layout("ddp", micro_batches=2),
    },
    "lc3": {
        "ZeRO-1": Layout("zero1"),
        "ZeRO-2": Layout("zero2"),
        "ZeRO-3": Layout("fsdp"),
        "ZeRO-3 in bfloat16": Layout("fsdp", bf16=True),
    },
    "lc4": {
        "tensor": Layout("none", {"data": 1, "tensor": 0}),
        "tensor and sequence": Layout(
            "none", {"data": 1, "tensor": 0}, model={"sequence_parallel": True}
        ),
        "data × tensor, DDP": Layout("ddp", {"data": 2, "tensor": 0}),
        "data × tensor, ZeRO-1": Layout("zero1", {"data": 2, "tensor": 0}),
        "data × tensor, FSDP": Layout("fsdp", {"data": 2, "tensor": 0}),
    },
    "lc5": {
        "1F1B": Layout("none", {"pipeline": 0, "data": 1}, "one_f_one_b"),
        "ZB-H1": Layout("none", {"pipeline": 0, "data": 1}, "zb_h1"),
        "1F1B × data, DDP": Layout("ddp", {"pipeline": 0, "data": 2}, "one_f_one_b"),
        "ZB-V × data, ZeRO-2": Layout("zero2", {"pipeline": 0, "data": 2}, "zb_v"),
        "interleaved × data, FSDP": Layout(
            "fsdp", {"pipeline": 0, "data": 2}, "interleaved"
        ),
    },
    "lc6": {
        "ring, zigzag": Layout("none", {"data": 1, "context": 0}),
        "Ulysses": Layout(
            "none", {"data": 1, "context": 0}, model={"context_attention": "ulysses"}
        ),
        "all-gather, zigzag": Layout(
            "none", {"data": 1, "context": 0}, model={"context_attention": "all_gather"}
        ),
        "ring × tensor": Layout("none", {"data": 1, "context": 0, "tensor": 2}),
        "data × ring, FSDP": Layout("fsdp", {"data": 2, "context": 0}),
    },
    "lc7": {
        "experts on all ranks": Layout("none", {"expert_data": 1, "expert": 0}),
        "expert_data × expert": Layout("none", {"expert_data": 2, "expert": 0}),
        "the same, FSDP": Layout("fsdp", {"expert_data": 2, "expert": 0}),
        "expert × tensor": Layout("none", {"expert_data": 1, "expert": 0, "tensor": 2}),
    },
}
"""By lecture, in the order of its figure and its table."""


def curve(lecture: str, name: str) -> dict[str, Any]:
    """Losses and gradient norms of the run in one of LAYOUTS."""
    return run(trained_by(lecture, name))


def trained_by(lecture: str, name: str) -> Training:
    """The model in a layout, with gradients summed over the ranks."""
    layout, options = LAYOUTS[lecture][name], dict[str, Any]()
    left = dist.get_world_size() // prod(filter(None, layout.axes.values()))
    sizes = tuple(size or left for size in layout.axes.values())
    mesh = init_mesh(sizes, tuple(layout.axes))
    model: Any  # whose naive wrapper is called by hand
    config = EXPERTS if "expert" in layout.axes else CONFIG
    dtype = torch.float32 if layout.bf16 else torch.float64
    if layout.wrapper in ("ddp", "zero1", "zero2"):
        options["bucket_cap_mb"] = BUCKET_MB
    if layout.bf16:
        options["compute_dtype"] = torch.bfloat16
    if layout.schedule:
        schedule = SCHEDULES[layout.schedule](mesh["pipeline"].size(), MICRO_BATCHES)
        stages = XtrainModel.stages(config, mesh, schedule, dtype=dtype)
        model = wrap(stages, mesh, layout.wrapper, schedule=schedule, **options)
    else:
        bare = XtrainModel(config, mesh, dtype=dtype, **layout.model)
        kind = "none" if layout.wrapper == "naive" else layout.wrapper
        model = wrap(bare, mesh, kind, **options)
    clipped: Callable[[float], Tensor] = partial(clip_grad_norm, model)
    if layout.wrapper == "naive":
        model.stages[0].module, clipped = NaiveDataParallel(bare), clip(bare)
    ours = layout.wrapper in ("zero1", "zero2", "fsdp")
    optimizer = model.optimizer(
        AdamW if ours else torch.optim.AdamW,
        [{"params": list(model.parameters())}],
        **ADAMW,
    )

    def gradients(tokens: Tensor, labels: Tensor) -> Tensor:
        if layout.schedule:
            tokens, labels = with_more_rows(tokens, 0), with_more_rows(labels, IGNORED)
        loss = accumulate(model, tokens, labels, micro_batches=layout.micro_batches)
        if layout.wrapper == "naive":
            model.stages[0].module.reduce_gradients()
        return loss

    exact = not layout.bf16
    return Training(model, optimizer, gradients, clipped, exact, model.data_group)


def with_more_rows(rows: Tensor, value: int) -> Tensor:
    """At least one row for each micro-batch; labels of the added ones do not count."""
    return pad(rows, (0, 0, 0, max(MICRO_BATCHES - len(rows), 0)), value=value)
