"""What a step sends over each axis of the mesh, by the planner's formulas."""

from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.mesh import axis_group
from xtrain.plan.step_traffic import sent_by_axis, traffic_per_step
from xtrain.plan.transfer import TransferDtypes
from xtrain.train.recipe import Recipe


def transfer_dtypes(dtype: str) -> TransferDtypes:
    """What travels in a recipe of this dtype: bfloat16 is autocast over float32."""
    size = 8 if dtype == "float64" else 4
    wide = 2 if dtype == "bfloat16" else size
    return TransferDtypes(dtype, size, size, wide, wide, wide)


def bytes_by_axis(recipe: Recipe, mesh: DeviceMesh) -> dict[str, int] | None:
    """Bytes that this rank sends in a step, by axis; None for uneven shares."""
    layout = recipe.layout
    rows, rest = divmod(recipe.batch, layout.data * layout.micro_batches)
    if rest:
        return None
    group = axis_group(mesh, "pipeline")
    rows_of_vocabulary = recipe.model.vocab_rows  # its padding travels, too
    transfers = traffic_per_step(
        replace(recipe.model, vocab_size=rows_of_vocabulary, padded_vocab_size=None),
        replace(layout, micro_batch=rows),
        recipe.data.sequence,
        rank=0 if group is None else group.rank(),
        dtypes=transfer_dtypes(recipe.dtype),
    )
    return {axis: sent for axis, sent in sent_by_axis(transfers).items() if sent}
