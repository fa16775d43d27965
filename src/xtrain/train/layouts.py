"""A layout made real: the mesh, the schedule, and this rank's parts of the model.

    Layout(data=2, tensor=2, pipeline=2)    mesh        pipeline  data  tensor
                                            rank 5 is          1     0       1

The last axis varies fastest, so tensor ranks are neighbours: they send most often.
With expert ranks the data axis is two axes, ("expert_data", "expert").
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.pipeline_parallel import PipelineStage
from xtrain.plan import Layout
from xtrain.schedules import SCHEDULES, Schedule
from xtrain.train.wrap import WrappedModel, wrap

RECOMPUTE = {"none": "none", "selective": "selective", "full": "layer"}
"""What a layout's word is in a model's options."""
PLANNED_ONLY = {
    "offload": "the optimizer's state stays on the device",
    "expert_tensor": "experts are cut over `tensor` ranks",
    "shard_context": "ZeRO shards over data ranks alone",
}
"""Fields of a layout that the planner counts and the trainer does not have."""


def axes_of(layout: Layout) -> dict[str, int]:
    """The sizes of the mesh by axis, outermost first."""
    data = {"data": layout.data}
    if layout.expert > 1:
        data = {"expert_data": layout.expert_data, "expert": layout.expert}
    inner = {"context": layout.context, "tensor": layout.tensor}
    return {"pipeline": layout.pipeline, **data, **inner}


def make_mesh(layout: Layout, device_type: str | None = None) -> DeviceMesh:
    """The mesh of a layout over the whole world; every rank calls it.

    ValueError on every rank if the sizes do not make up the world.
    """
    check_layout(layout, dist.get_world_size())
    axes = axes_of(layout)
    return init_mesh(tuple(axes.values()), tuple(axes), device_type)


def check_layout(layout: Layout, world: int) -> None:
    """ValueError unless the trainer has this layout, for so many ranks."""
    if layout.gpus != world:
        sizes = " x ".join(f"{n} {size}" for n, size in axes_of(layout).items())
        raise ValueError(
            f"layout of {sizes} = {layout.gpus} ranks, but there are {world}"
        )
    if layout.data % layout.expert:
        raise ValueError(
            f"layout.expert={layout.expert} does not divide layout.data={layout.data}"
        )
    default = Layout()
    for name, instead in PLANNED_ONLY.items():
        if getattr(layout, name) != getattr(default, name):
            value = getattr(layout, name)
            raise ValueError(f"layout.{name}={value!r} can only be planned: {instead}")
    if layout.replicate > 1 and layout.zero != 3:
        raise ValueError(
            f"layout.replicate={layout.replicate} with zero={layout.zero}: hybrid "
            "sharding is of stage 3"
        )


def make_schedule(layout: Layout) -> Schedule:
    """The schedule of a layout's pipeline; gpipe for a pipeline of one rank."""
    ranks, count = layout.pipeline, layout.micro_batches
    if ranks == 1:
        return SCHEDULES["gpipe"](1, count)
    made = SCHEDULES[layout.schedule]
    options = {"chunks": layout.chunks} if layout.schedule == "interleaved" else {}
    return made(ranks, count, **options)


def wrapper_of(layout: Layout) -> str:
    """The `kind` of `wrap` for a layout.

    Without ZeRO, gradients that are summed over several axes are summed once, over the
    ranks of all of them.
    """
    several = layout.context > 1 or layout.expert > 1
    if layout.expert_data == 1 or (layout.zero == 0 and several):
        return "none"
    if layout.replicate > 1:
        return "hsdp"
    return ("ddp", "zero1", "zero2", "fsdp")[layout.zero]


def make_model(
    config: XtrainConfig,
    layout: Layout,
    mesh: DeviceMesh | None,
    *,
    sequence: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> XtrainModel | list[PipelineStage]:
    """The whole model, cut over the mesh; with pipeline ranks this rank's stages.

    Args:
        sequence: the length for which pipeline stages are to cost the same.
    """
    options: dict[str, Any] = {
        "sequence_parallel": layout.sequence_parallel,
        "recompute": RECOMPUTE[layout.recompute],
        "recomputed_layers": layout.recomputed_layers,
        "context_attention": layout.context_way,
        "device": device,
        "dtype": dtype,
    }
    if layout.pipeline == 1:
        return XtrainModel(config, mesh, **options)
    schedule = make_schedule(layout)
    return XtrainModel.stages(config, mesh, schedule, sequence=sequence, **options)


def wrapped_model(
    config: XtrainConfig,
    layout: Layout,
    mesh: DeviceMesh | None = None,
    *,
    shapes_alone: bool = False,
    **options: Any,
) -> WrappedModel:
    """`make_model` in the wrapper of the layout; options are those of `make_model`.

    Args:
        mesh: `make_mesh(layout)` unless given.
        shapes_alone: on torch's meta device, and so are shards, as a dry run has it.
    """
    mesh = make_mesh(layout) if mesh is None else mesh
    more: dict[str, Any] = {"device": "meta"} if shapes_alone else {}
    bare = make_model(config, layout, mesh, **options, **more)
    kind = wrapper_of(layout)
    if kind == "hsdp":
        more["inner"] = layout.expert_data // layout.replicate
    if kind == "fsdp":
        more["reshard_after_forward"] = layout.reshard_after_forward
    return wrap(
        bare,
        mesh,
        kind,
        schedule=None if layout.pipeline == 1 else make_schedule(layout),
        reduce_at_end=layout.reduce_at_end,
        **more,
    )
