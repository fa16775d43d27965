"""What ranks hold of a model's matrices, under any wrapper.

    DDP                  every rank holds whole matrices, with whole gradients
    bare, ZeRO-1         whole matrices; each gradient is one part of a sum
    FSDP, ZeroOptimizer  flat ranges of matrices
    tensor, expert       rows, columns, experts; or flat ranges of those, or copies

One description serves all: the `Shard`s of checkpoints.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.checkpoint.boxes import Box
from xtrain.checkpoint.parameter_slice import all_ranks_of, placement_in
from xtrain.checkpoint.pieces import Shard, whole
from xtrain.comm.wrapper_mesh import Over, ranks_to_reduce
from xtrain.zero.buckets import ShardedBucket
from xtrain.zero.fsdp import FullyShardedDataParallel
from xtrain.zero.fsdp_checkpoint import shards_of
from xtrain.zero.muon_checks import check_whole

NOT_HIDDEN = ("embed", "head")
"""Parts of the names of matrices that are not hidden ones."""


class MatrixLayout(NamedTuple):
    """What this rank holds of a module's parameters, and with whom.

    Attributes:
        shards: of every parameter of the module.
        group: all ranks that hold some.
        over: the ranks whose gradients Muon sums; None if they are summed already.
        masters: under `ZeroOptimizer`, what is stepped, and the shards in it.
    """

    shards: list[Shard]
    group: ProcessGroup | None
    over: Over | None = None
    masters: Mapping[Tensor, Sequence[Shard]] | None = None

    @property
    def stepped(self) -> Mapping[Tensor, Sequence[Shard]]:
        """By tensor that an optimizer may step, the shards end to end in it."""
        if self.masters is not None:
            return self.masters
        return {shard.tensor: [shard] for shard in self.shards}


def matrix_layout(
    module: nn.Module,
    process_group: ProcessGroup | None = None,
    gradient_reduction: str | None = None,
) -> MatrixLayout:
    """The layout of a module that is bare, on a mesh, in DDP or in FSDP.

    Args:
        process_group: of a bare module; that of its wrapper or mesh unless given.
        gradient_reduction: "average" or "sum", for ZeRO-1: the module is bare, ranks
            of the group bring batches of their own, and Muon reduces the gradients of
            its matrices, which begin with rank 0's values. None: a wrapper or
            `sync_gradients` does, before the step.
    """
    group = getattr(module, "process_group", process_group)
    over = None
    if gradient_reduction is not None:
        over = ranks_to_reduce(module, process_group, gradient_reduction)
        group = over.group
    inner = getattr(module, "module", module)
    return MatrixLayout(shards_in(module), all_ranks_of(inner, group), over)


def whole_matrices(
    groups: list[dict[str, Any]], process_group: ProcessGroup | None
) -> MatrixLayout:
    """The layout of an optimizer's parameters, if all ranks hold them whole."""
    parameters = [p for group in groups for p in group["params"]]
    check_whole(parameters)
    shards = [whole(f"matrix {n}", parameter) for n, parameter in enumerate(parameters)]
    return MatrixLayout(shards, process_group)


def layout_of_masters(
    layout: MatrixLayout, buckets: Iterable[ShardedBucket], rank: int
) -> MatrixLayout:
    """The layout of what `ZeroOptimizer` steps: flat ranges of what ranks would hold.

    Args:
        layout: of the module whose parameters are in the buckets.
        rank: among the ranks that share the buckets.
    """
    held = {shard.tensor: shard for shard in layout.shards}
    masters: dict[Tensor, list[Shard]] = {}
    for bucket in buckets:
        if not held.keys() >= set(bucket.parameters):
            continue  # Muon will not find it, and tell all ranks
        flat, found = bucket.layout, []
        pieces = flat.pieces(bucket.master.detach(), rank)
        for parameter, slot, piece in zip(
            bucket.parameters, flat.slots, pieces, strict=True
        ):
            shard, (start, _) = held[parameter], flat.piece_bounds(slot, rank)
            assert not isinstance(shard.offset, int)
            box = Box(tuple(shard.offset), tuple(slot.shape))
            found.append(Shard(shard.name, shard.shape, start, piece, box))
        masters[bucket.master] = found
    shards = [shard for found in masters.values() for shard in found]
    return MatrixLayout(shards, layout.group, masters=masters)


def shards_in(module: nn.Module) -> list[Shard]:
    """This rank's part of every parameter of a module, wrapped or bare."""
    inner = getattr(module, "module", module)
    if isinstance(module, FullyShardedDataParallel):
        return shards_of(module.units, inner)
    return [
        placement_in(inner, name).shard(name, parameter)
        for name, parameter in inner.named_parameters()
    ]


def hidden_matrices(
    module: nn.Module, exclude: Iterable[str] = NOT_HIDDEN
) -> tuple[list[Tensor], list[Tensor]]:
    """A module's trained parameters: those for Muon, and all others, for AdamW.

    For Muon are matrices and stacks of matrices, by the shape of the full parameter,
    but for those with a part of `exclude` in their names: embeddings and heads.
    """
    found: tuple[list[Tensor], list[Tensor]] = [], []
    parts = tuple(exclude)
    for shard in shards_in(module):
        hidden = len(shard.shape) in (2, 3) and not any(x in shard.name for x in parts)
        if shard.tensor.requires_grad:
            found[not hidden].append(shard.tensor)
    return found
