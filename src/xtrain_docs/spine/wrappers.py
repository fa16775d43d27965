"""The spine's run under the wrappers and layouts of each lecture, on every rank."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from torch.optim import Optimizer

from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.model import XtrainModel, clip_stages_grad_norm_
from xtrain.model.layer import DecoderLayer
from xtrain.model.mesh_axes import batch_group
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES
from xtrain.zero import AdamW, FullyShardedDataParallel, ZeroOptimizer

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
        wrapper: over the ranks of the first data axis; "naive", "ddp", "zero 1",
            "zero 2", "fsdp", or none.
        axes: of the mesh with their sizes, 0 for the ranks that are left; without axes
            the model is given no mesh.
        schedule: of a pipeline.
        model: options of XtrainModel.
    """

    wrapper: str = ""
    axes: dict[str, int] = field(default_factory=dict)
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
        "ZeRO-1": Layout("zero 1"),
        "ZeRO-2": Layout("zero 2"),
        "ZeRO-3": Layout("fsdp"),
        "ZeRO-3 in bfloat16": Layout("fsdp", bf16=True),
    },
    "lc4": {
        "tensor": Layout("", {"data": 1, "tensor": 0}),
        "tensor and sequence": Layout(
            "", {"data": 1, "tensor": 0}, model={"sequence_parallel": True}
        ),
        "data × tensor, DDP": Layout("ddp", {"data": 2, "tensor": 0}),
        "data × tensor, ZeRO-1": Layout("zero 1", {"data": 2, "tensor": 0}),
        "data × tensor, FSDP": Layout("fsdp", {"data": 2, "tensor": 0}),
    },
    "lc5": {
        "1F1B": Layout("", {"pipeline": 0, "data": 1}, "one_f_one_b"),
        "ZB-H1": Layout("", {"pipeline": 0, "data": 1}, "zb_h1"),
        "1F1B × data, DDP": Layout("ddp", {"pipeline": 0, "data": 2}, "one_f_one_b"),
        "ZB-V × data, ZeRO-2": Layout("zero 2", {"pipeline": 0, "data": 2}, "zb_v"),
        "interleaved × data, FSDP": Layout(
            "fsdp", {"pipeline": 0, "data": 2}, "interleaved"
        ),
    },
    "lc6": {
        "ring, zigzag": Layout("", {"data": 1, "context": 0}),
        "Ulysses": Layout(
            "", {"data": 1, "context": 0}, model={"context_attention": "ulysses"}
        ),
        "all-gather, zigzag": Layout(
            "", {"data": 1, "context": 0}, model={"context_attention": "all_gather"}
        ),
        "ring × tensor": Layout("", {"data": 1, "context": 0, "tensor": 2}),
        "data × ring, FSDP": Layout("fsdp", {"data": 2, "context": 0}),
    },
    "lc7": {
        "experts on all ranks": Layout("", {"expert_data": 1, "expert": 0}),
        "expert_data × expert": Layout("", {"expert_data": 2, "expert": 0}),
        "the same, FSDP": Layout("fsdp", {"expert_data": 2, "expert": 0}),
        "expert × tensor": Layout("", {"expert_data": 1, "expert": 0, "tensor": 2}),
    },
}
"""By lecture, in the order of its figure and its table."""


def curve(lecture: str, name: str) -> dict[str, Any]:
    """Losses and gradient norms of the run in one of LAYOUTS."""
    return run(trained_by(lecture, name))


def trained_by(lecture: str, name: str) -> Training:
    """The model in a layout, with gradients summed over the ranks."""
    layout, mesh, group = LAYOUTS[lecture][name], None, None
    if layout.axes:
        left = dist.get_world_size() // prod(filter(None, layout.axes.values()))
        sizes = tuple(size or left for size in layout.axes.values())
        mesh = init_mesh(sizes, tuple(layout.axes))
        (axis,) = layout.axes.keys() & {"data", "expert_data"}
        group = mesh[axis].get_group()
    if mesh is not None and layout.schedule:
        return in_stages(layout, mesh, group)
    config = EXPERTS if "expert" in layout.axes else CONFIG
    dtype = torch.float32 if layout.bf16 else torch.float64
    bare = XtrainModel(config, mesh, dtype=dtype, **layout.model)
    model = wrapped(bare, layout, group)
    optimizer = optimizer_of(list(model.parameters()), layout.wrapper, group)
    training = Training(model, optimizer, clip(bare), exact=not layout.bf16,
                        micro_batches=layout.micro_batches)  # fmt: skip
    if layout.wrapper == "naive":
        training.reduce = model.reduce_gradients
    if mesh is not None:
        summed = (axis,) if layout.wrapper else ()
        training.clip = bare.clip_grad_norm_
        training.reduce = lambda: bare.sync_gradients(skip=summed)
        training.data, training.mean_of_all = batch_group(mesh), True
    if layout.wrapper == "fsdp":
        training.clip = model.clip_grad_norm_
    elif isinstance(optimizer, ZeroOptimizer):
        cut = None if mesh is None else bare
        training.clip = lambda norm: optimizer.clip_grad_norm_(norm, cut)
    return training


def wrapped(module: nn.Module, layout: Layout, group: ProcessGroup | None) -> Any:
    """The module in the layout's wrapper; as it is under ZeRO, or without one."""
    over: dict[str, Any] = {"process_group": group, "gradient_reduction": "sum"}
    match layout.wrapper:
        case "naive":
            return NaiveDataParallel(module, **over)
        case "ddp":
            return DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, **over)
        case "fsdp":
            low = torch.bfloat16 if layout.bf16 else None
            return FullyShardedDataParallel(
                module, blocks=[DecoderLayer], compute_dtype=low, **over
            )
    return module


def optimizer_of(
    parameters: list[nn.Parameter], wrapper: str, group: ProcessGroup | None
) -> Optimizer:
    """AdamW over the parameters: sharded by ZeRO, ours over shards, else torch's."""
    if wrapper.startswith("zero"):
        return ZeroOptimizer(
            parameters, AdamW, stage=int(wrapper[-1]), process_group=group,
            bucket_cap_mb=BUCKET_MB, gradient_reduction="sum", **ADAMW,
        )  # fmt: skip
    kind = AdamW if wrapper == "fsdp" else torch.optim.AdamW
    return kind(parameters, **ADAMW)


def in_stages(layout: Layout, mesh: DeviceMesh, group: ProcessGroup | None) -> Training:
    """This rank's stages under their wrapper, and a runner."""
    pipeline = mesh["pipeline"].get_group()
    schedule = SCHEDULES[layout.schedule](pipeline.size(), MICRO_BATCHES)
    stages = XtrainModel.stages(CONFIG, mesh, schedule, dtype=torch.float64)
    loss_fn = stages[0].module.loss_fn
    for stage in stages:
        stage.module = wrapped(stage.module, layout, group)
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer: Any = optimizer_of(parameters, layout.wrapper, group)
    if isinstance(optimizer, ZeroOptimizer):
        for stage in stages:
            stage.reduction = optimizer
    runner = PipelineRunner(stages, schedule, loss_fn, pipeline, data_group=group)
    return Training(
        stages, optimizer, lambda norm: clip_stages_grad_norm_(stages, norm),
        data=group,
        whole_step=lambda *rows: runner.step(*map(with_more_rows, rows, (0, IGNORED))),
    )  # fmt: skip


def with_more_rows(rows: Tensor, value: int) -> Tensor:
    """At least one row for each micro-batch; labels of the added ones do not count."""
    return pad(rows, (0, 0, 0, max(MICRO_BATCHES - len(rows), 0)), value=value)
