"""Checkpoints of ZeRO 1 and 2: what the buckets hold, as flat shards of parameters.

bucket   | weight     | bias | ...      masters of one rank's shard, stepped as one
shards     weight[2:]   bias            what any stage and world size can load
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint.files import save_pieces
from xtrain.checkpoint.optimizer_state import (
    Saved,
    States,
    StateSpec,
    empty_state,
    wants_numbers_on_device,
)
from xtrain.checkpoint.parameter_slice import all_ranks_of, placement_in
from xtrain.checkpoint.pieces import Shard, persistent_buffers, whole
from xtrain.checkpoint.training_state import Write, load_state, save_state
from xtrain.comm.agreement import raising_everywhere
from xtrain.comm.checks import rank_and_size
from xtrain.zero.buckets import ShardedBucket
from xtrain.zero.clip import clip_sharded_grad_norm_

# Views of the masters, one for each parameter.
ByBucket = dict[ShardedBucket, list[Shard]]


def save_buckets(
    directory: str | Path,
    step: int,
    module: nn.Module,
    buckets: list[ShardedBucket],
    optimizer: Optimizer,
    extra: dict[str, Any] | None,
    group: ProcessGroup | None,
    write: Write = save_pieces,
) -> Path:
    """Write the masters of all buckets and their state, and what is whole of `module`.

    `optimizer` steps the buckets' masters.
    """
    rank, _ = rank_and_size(group)
    all_ranks = all_ranks_of(module, group)
    with raising_everywhere(ValueError, group=all_ranks):
        by_bucket = shards_of(buckets, module, rank)
    shards = [shard for shards in by_bucket.values() for shard in shards]
    if rank == 0:
        shards += whole_of(buckets, module)
    states = cut_states(by_bucket, optimizer, rank)
    known = directory, step, shards, states, optimizer, extra, all_ranks
    return save_state(*known, write)


def load_buckets(
    path: str | Path,
    module: nn.Module,
    buckets: list[ShardedBucket],
    optimizer: Optimizer,
    group: ProcessGroup | None,
) -> tuple[int, dict[str, Any] | None]:
    """Fill the masters, the optimizer's state and what is whole; its step and extra."""
    rank, _ = rank_and_size(group)
    all_ranks = all_ranks_of(module, group)
    with raising_everywhere(ValueError, group=all_ranks):
        by_bucket = shards_of(buckets, module, rank)
    shards = [shard for shards in by_bucket.values() for shard in shards]
    made = States()

    def make_states(saved: Saved) -> States:
        for bucket, parts in by_bucket.items():
            specs = [saved.get(shard.name, {}) for shard in parts]
            made.update(make_state(bucket, parts, specs, optimizer, rank))
        return made

    everything = shards + whole_of(buckets, module)
    result = load_state(path, everything, make_states, optimizer, all_ranks)
    merge_step_counts(by_bucket, made, optimizer)
    return result


def clip_of_module(
    buckets: list[ShardedBucket],
    module: nn.Module,
    max_norm: float,
    group: ProcessGroup | None,
) -> Tensor:
    """Clip by the norm of the whole model, of which `module` may be a slice."""
    by_bucket = shards_of(buckets, module, rank_and_size(group)[0], gradients=True)
    shards = [shard for of_bucket in by_bucket.values() for shard in of_bucket]
    return clip_sharded_grad_norm_(
        [shard.tensor for shard in shards],
        max_norm,
        all_ranks_of(module, group),
        [placement_in(module, shard.name).is_first for shard in shards],
    )


def shards_of(
    buckets: list[ShardedBucket], module: nn.Module, rank: int, gradients: bool = False
) -> ByBucket:
    """This rank's part of every parameter, with its name in `module`.

    Of the parameters' gradients, for buckets that have some, if asked for these.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    missing = sum(p not in names for bucket in buckets for p in bucket.parameters)
    if missing:
        raise ValueError(f"{missing} parameters of the optimizer are not of module")
    found: ByBucket = {bucket: [] for bucket in buckets}
    for bucket, shards in found.items():
        layout = bucket.layout
        flat = bucket.master.grad if gradients else bucket.master.detach()
        if flat is None:
            continue
        pieces = layout.pieces(flat, rank)
        for piece, slot, parameter in zip(
            pieces, layout.slots, bucket.parameters, strict=True
        ):
            start, _ = layout.piece_bounds(slot, rank)
            name = names[parameter]
            place = placement_in(module, name)
            shards.append(place.flat_shard(name, slot.shape, start, piece))
    return found


def whole_of(buckets: list[ShardedBucket], module: nn.Module) -> list[Shard]:
    """What no rank of the group has alone: frozen parameters and buffers."""
    sharded = {p for bucket in buckets for p in bucket.parameters}
    others = {n: p for n, p in module.named_parameters() if p not in sharded}
    frozen = [placement_in(module, name).shard(name, p) for name, p in others.items()]
    return frozen + [whole(n, t) for n, t in persistent_buffers(module).items()]


def cut_states(by_bucket: ByBucket, optimizer: Optimizer, rank: int) -> States:
    """The optimizer's state of each shard: what is as long as the master is cut."""
    states = States()
    for bucket, shards in by_bucket.items():
        state = optimizer.state.get(bucket.master, {})
        for number, shard in enumerate(shards):
            states[shard.tensor] = {
                key: bucket.layout.pieces(value, rank)[number]
                if value.shape == bucket.master.shape
                else value
                for key, value in state.items()
            }
    return states


def make_state(
    bucket: ShardedBucket,
    shards: list[Shard],
    saved: list[dict[str, StateSpec]],
    optimizer: Optimizer,
    rank: int,
) -> States:
    """State for a bucket, cut into that of its shards; zero where none was saved."""
    optimizer.state.pop(bucket.master, None)
    specs: dict[str, StateSpec] = {}
    for specs_of_shard in saved:
        specs |= specs_of_shard
    if not specs:
        return {}
    state = empty_state(bucket.master, specs, wants_numbers_on_device(optimizer))
    optimizer.state[bucket.master] = state
    return {
        shard.tensor: {
            key: bucket.layout.pieces(state[key], rank)[number]
            if specs[key].sharded
            else state[key].clone()
            for key in saved[number]
        }
        for number, shard in enumerate(shards)
    }


def merge_step_counts(by_bucket: ByBucket, made: States, optimizer: Optimizer) -> None:
    """A bucket steps as one: it has the largest of its parameters' step counts."""
    for bucket, shards in by_bucket.items():
        for key, value in optimizer.state.get(bucket.master, {}).items():
            if value.dim() == 0:
                states = [made[shard.tensor] for shard in shards]
                value.copy_(torch.stack([s[key] for s in states if key in s]).max())
