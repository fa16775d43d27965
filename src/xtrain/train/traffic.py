"""What a step sends over each axis of the mesh, by the planner's formulas."""

from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.mesh import axis_group
from xtrain.plan.step_traffic import sent_by_axis, traffic_per_step
from xtrain.plan.transfer import TransferDtypes
from xtrain.train.recipe import Recipe

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 4}
"""Of weights and gradients; with bfloat16 activations have 2 bytes."""


def bytes_by_axis(recipe: Recipe, mesh: DeviceMesh) -> dict[str, int] | None:
    """Bytes that this rank sends in a step, by axis; None for uneven shares."""
    layout = recipe.layout
    rows, rest = divmod(recipe.batch, layout.data * layout.micro_batches)
    if rest:
        return None
    group = axis_group(mesh, "pipeline")
    size = ITEMSIZE[recipe.dtype]
    wide = 2 if recipe.dtype == "bfloat16" else size
    dtypes = TransferDtypes(recipe.dtype, size, size, wide, wide, wide)
    rows_of_vocabulary = recipe.model.vocab_rows  # its padding travels, too
    transfers = traffic_per_step(
        replace(recipe.model, vocab_size=rows_of_vocabulary, padded_vocab_size=None),
        replace(layout, micro_batch=rows),
        recipe.data.sequence,
        rank=0 if group is None else group.rank(),
        dtypes=dtypes,
    )
    return {axis: sent for axis, sent in sent_by_axis(transfers).items() if sent}
