"""Save and load a wrapped model with its optimizer: any layout into any other.

wrapper      what a rank holds                        in the checkpoint
none, ddp    slices of parameters (tensor, expert)    boxes
zero1, 2     shards of masters, in the optimizer      a few boxes each
fsdp, hsdp   flat shards of slices                    a few boxes each
"""

from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint import Shard, load_checkpoint, save_checkpoint
from xtrain.checkpoint.files import save_pieces
from xtrain.checkpoint.folder import INDEX, delete_set_aside, set_aside
from xtrain.checkpoint.locks import names_locked
from xtrain.checkpoint.training_state import Write
from xtrain.train.wrap import WrappedModel
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer
from xtrain.zero.fsdp_checkpoint import load_units, save_units
from xtrain.zero.fsdp_unit import FSDPUnit


def save(
    directory: str | Path,
    step: int,
    model: WrappedModel,
    optimizer: Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    write: Write = save_pieces,
) -> Path:
    """Write a checkpoint, every rank what it holds; its path. Every rank calls it.

    Args:
        extra: any JSON value; rank 0's is kept.
        write: a `BackgroundWriter` copies, and writes while training goes on.

    Raises:
        CheckpointError: on every rank: something cannot be written.
    """
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.save_sharded(directory, step, model, extra, write)
    if units := units_of(model):
        group = sharding_group(model)
        what = model, units, optimizer, extra, group
        return save_units(directory, step, *what, write)
    group, shards = model.all_ranks(), shards_of(model)
    return save_checkpoint(directory, step, shards, optimizer, extra, group, write)


def load(
    path: str | Path, model: WrappedModel, optimizer: Optimizer | None = None
) -> tuple[int, Any]:
    """Read what any layout has saved, or a run's newest; its step and extra.

    Raises:
        CheckpointError: on every rank, and nothing has changed: it does not fit.
    """
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.load_sharded(path, model)
    if units := units_of(model):
        group = sharding_group(model)
        return load_units(path, model, units, optimizer, group)
    return load_checkpoint(path, shards_of(model), optimizer, model.all_ranks())


def shards_of(model: WrappedModel) -> list[Shard]:
    """Of parameters that are whole or slices, and buffers."""
    return [shard for part in model.parts for shard in part.shards()]


def units_of(model: WrappedModel) -> list[FSDPUnit]:
    """Of all stages that FSDP is around."""
    wrappers = [stage.module for stage in model.stages]
    return [
        unit
        for around in wrappers
        if isinstance(around, FullyShardedDataParallel)
        for unit in around.units
    ]


def sharding_group(model: WrappedModel) -> ProcessGroup | None:
    """The ranks that FSDP shards over; the same of all stages."""
    around = model.stages[0].module
    assert isinstance(around, FullyShardedDataParallel)
    return around.process_group


def keep_newest(directory: str | Path, count: int, step: int) -> None:
    """Delete all but the newest `count` checkpoints of a run; one rank calls it.

    One that a job is reading stays, and those after `step`: they are of another run.
    """
    folder = Path(directory)
    complete = [path for path in folder.glob("step-*") if (path / INDEX).is_file()]
    with names_locked(folder) as alone:
        beyond = f"step-{step:08}."  # after "step-00000010-1234abcd"
        own = sorted(path for path in complete if path.name < beyond)
        for path in own[: -count or None]:
            if alone:
                set_aside(path, INDEX)
    delete_set_aside(folder)
