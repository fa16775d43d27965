"""Save and load a sharded model and its optimizer: any layout loads into any other.

    shards = [
        Shard("mlp.up.weight", (4096, 1024), (rank * 1024, 0), up),     # rows
        Shard("mlp.down.weight", (1024, 4096), (0, rank * 1024), down), # columns
        Shard("norm.weight", (1024,), (0,), norm),                      # on every rank
    ]
    save_checkpoint("run", step, shards, optimizer, {"epoch": 3})
    step, extra = load_checkpoint("run", shards, optimizer)

Every rank of the group calls them with what it holds; a process alone needs no group.
State of the optimizer is found
by a shard's tensor: what has its shape is cut as it is cut, and the rest are numbers
(the step). Ranks that hold the same part of a tensor must hold the same values, and one
of them writes it. Loading, each rank asks for what it holds then.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint.errors import CheckpointError, CheckpointReplaced
from xtrain.checkpoint.files import save_pieces
from xtrain.checkpoint.opening import (
    check_same_checkpoint,
    open_everywhere,
    wanted_anywhere,
)
from xtrain.checkpoint.optimizer_state import (
    Saved,
    States,
    check_groups,
    empty_state,
    group_options,
    kind_of,
    load_groups,
    saved_pieces,
    saved_state,
    state_pieces,
    wants_numbers_on_device,
)
from xtrain.checkpoint.pieces import Shard
from xtrain.checkpoint.random_state import (
    random_pieces,
    random_states,
    read_random_states,
    set_random_states,
)
from xtrain.comm.agreement import place_in, raising_everywhere

Write = Callable[..., Path]
"""(directory, step, pieces, extra, group) -> path, as `save_pieces`."""


def save_checkpoint(
    directory: str | Path,
    step: int,
    shards: list[Shard],
    optimizer: Optimizer | None = None,
    extra: Any = None,
    group: ProcessGroup | None = None,
    write: Write = save_pieces,
) -> Path:
    """Write every rank's shards, their optimizer state and the ranks' random states.

    Returns the checkpoint's path. `extra` is any JSON value, rank 0's is kept. `write`
    is what writes the pieces, as a `BackgroundWriter` does.
    ValueError on every rank if a shard is not within its tensor, CheckpointError if the
    ranks' shards do not make up every tensor, or something cannot be written.
    """
    states = States() if optimizer is None else optimizer.state
    return save_state(directory, step, shards, states, optimizer, extra, group, write)


def load_checkpoint(
    path: str | Path,
    shards: list[Shard],
    optimizer: Optimizer | None = None,
    group: ProcessGroup | None = None,
) -> tuple[int, Any]:
    """Fill the shards and their optimizer state; the checkpoint's step and extra.

    `path` is a checkpoint or a run, whose newest is loaded. The ranks together must
    want every tensor of the checkpoint and no other; how each is cut does not matter.
    Values are converted to the dtype of the shards here, and so is the optimizer's
    state that had its parameter's dtype.
    CheckpointError on every rank if anything is wrong on one, and then nothing has
    changed; CheckpointReplaced if it vanished meanwhile and another load may work.
    """

    def make_states(saved: Saved) -> States:
        assert optimizer is not None
        return make_optimizer_state(shards, saved, optimizer)

    return load_state(path, shards, make_states, optimizer, group)


def make_optimizer_state(
    shards: list[Shard], saved: Saved, optimizer: Optimizer
) -> States:
    """State to be filled for each tensor that the optimizer steps, and no other."""
    on_device = wants_numbers_on_device(optimizer)
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    for shard in shards:
        if shard.tensor in stepped:
            optimizer.state.pop(shard.tensor, None)
            if specs := saved.get(shard.name):
                state = empty_state(shard.tensor, specs, on_device)
                optimizer.state[shard.tensor] = state
    return optimizer.state


# -- where the optimizer steps something else than the shards


def save_state(
    directory: str | Path,
    step: int,
    shards: list[Shard],
    states: States,
    optimizer: Optimizer | None,
    extra: Any,
    group: ProcessGroup | None,
    write: Write = save_pieces,
) -> Path:
    """`save_checkpoint`, with the state of each shard's tensor given."""
    rank, size = place_in(group)
    with raising_everywhere(ValueError, group=group):
        for shard in shards:
            shard.check()
        pieces = [piece for shard in shards for piece in shard.pieces()]
        pieces += state_pieces(shards, states)
        pieces += random_pieces(rank, random_states())
        about = {"user": extra, "ranks": size, "groups": group_options(optimizer)}
        about["optimizer"] = kind_of(optimizer)
    return write(directory, step, pieces, about, group)


@torch.no_grad()
def load_state(
    path: str | Path,
    shards: list[Shard],
    make_states: Callable[[Saved], States],
    optimizer: Optimizer | None,
    group: ProcessGroup | None,
) -> tuple[int, Any]:
    """`load_checkpoint`, with a function that makes the state of the shards' tensors.

    Random states come back when as many ranks load as had saved. The ranks look at
    every piece of every file, and agree, before the first one is put in its place. So a
    load reads the checkpoint twice.
    """
    rank, size = place_in(group)
    failures = CheckpointReplaced, CheckpointError
    wanted = wanted_anywhere(shards, group)
    with open_everywhere(path, group) as reader:
        with raising_everywhere(*failures, group=group):
            reader.check(wanted, ignore=":")
            check_groups(optimizer, reader)
            saved = saved_state(reader)
            if optimizer is None:
                saved = {}
            pieces = [piece for shard in shards for piece in shard.pieces()]
            reader.verify(pieces + saved_pieces(shards, saved), rank, size)
            same_size = reader.extra["ranks"] == size
            random = read_random_states(reader, rank) if same_size else {}
        check_same_checkpoint(reader, group)
        # A file that is damaged from now on is still refused, but too late.
        with raising_everywhere(*failures, group=group):
            if optimizer is not None:
                load_groups(optimizer, reader)
                pieces += state_pieces(shards, make_states(saved))
            reader.read(pieces)
            set_random_states(random)
        return reader.step, reader.extra["user"]
