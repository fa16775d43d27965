"""A sharded model and its optimizer as the pieces of a checkpoint, and back.

Every stage hands over the same things, so what one saves any other loads:

    pieces   ranges of parameters that only this rank has, with their optimizer state
    whole    tensors that every rank has whole; rank 0 writes them
    states   of each piece: tensors cut as it is cut (moments), or one number (the step)
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.comm.agreement import raising_everywhere
from xtrain.comm.checks import rank_and_size
from xtrain.zero.checkpoint import agree, save_pieces
from xtrain.zero.checkpoint_index import (
    CheckpointError,
    CheckpointReplaced,
    Piece,
    is_count,
)
from xtrain.zero.checkpoint_reader import CheckpointReader, open_newest, open_same

Place = tuple[str, tuple[int, ...], int]  # name, full shape, first element held here
States = dict[Tensor, dict[str, Tensor]]  # piece -> name of the state -> its tensor


class Kind(NamedTuple):
    """What a checkpoint has of one state of one parameter."""

    cut: bool  # as the parameter is; otherwise one number
    dtype: torch.dtype


Saved = dict[str, dict[str, Kind]]  # parameter's name -> name of the state


def save(
    directory: str | Path,
    step: int,
    places: dict[Tensor, Place],
    whole: dict[str, Tensor],
    states: States,
    optimizer: Optimizer | None,
    extra: dict[str, Any] | None,
    group: ProcessGroup | None,
) -> Path:
    """Write everything, and this rank's random state."""
    rank, size = rank_and_size(group)
    pieces = [Piece(*place, data=piece) for piece, place in places.items()]
    if rank == 0:
        pieces += [Piece(n, tuple(t.shape), 0, t.reshape(-1)) for n, t in whole.items()]
    with raising_everywhere(ValueError, group=group):
        pieces += state_pieces(places, states)
        pieces += random_pieces(rank, random_states())
        about = {"user": extra, "ranks": size, "groups": group_options(optimizer)}
    return save_pieces(directory, step, pieces, about, group)


@torch.no_grad()
def load(
    path: str | Path,
    places: dict[Tensor, Place],
    whole: dict[str, Tensor],
    make_states: Callable[[Saved], States],
    optimizer: Optimizer | None,
    group: ProcessGroup | None,
) -> tuple[int, dict[str, Any] | None]:
    """Fill everything from a checkpoint of any world size; its step and extra.

    `path` is a checkpoint or a run, whose newest is loaded, as rank 0 finds it. Random
    states come back when as many ranks load as had saved. CheckpointError on every rank
    when anything is wrong on one, and then nothing has changed on any: the ranks look
    at every piece of every file, and agree, before the first one is put in its place.
    So a load reads the checkpoint twice.
    """
    rank, size = rank_and_size(group)
    failures = CheckpointReplaced, CheckpointError
    flat = {n: t.detach().reshape(-1).clone() for n, t in whole.items()}
    with open_everywhere(path, group) as reader:
        with raising_everywhere(*failures, group=group):
            wanted = [Piece(*p, data=piece.detach()) for piece, p in places.items()]
            wanted += [Piece(n, tuple(whole[n].shape), 0, t) for n, t in flat.items()]
            reader.check(wanted, ignore=":")
            check_groups(optimizer, reader)
            saved = saved_state(reader)
            if optimizer is None:
                saved = {}
            reader.verify(wanted + saved_pieces(places, saved), rank, size)
            same_size = reader.extra["ranks"] == size
            random = read_random_states(reader, rank) if same_size else {}
        check_same_checkpoint(reader, group)
        # A file that is damaged from now on is still refused, but too late.
        with raising_everywhere(*failures, group=group):
            if optimizer is not None:
                load_groups(optimizer, reader)
                wanted += state_pieces(places, make_states(saved))
            reader.read(wanted)
            for name, tensor in flat.items():
                whole[name].copy_(tensor.view(whole[name].shape))
            set_random_states(random)
        return reader.step, reader.extra["user"]


@contextmanager
def open_everywhere(
    path: str | Path, group: ProcessGroup | None
) -> Iterator[CheckpointReader]:
    """A checkpoint, or the newest of a run as rank 0 finds it, open on every rank."""
    failures = CheckpointReplaced, CheckpointError
    reader = name = None
    try:
        with raising_everywhere(*failures, group=group):
            if rank_and_size(group)[0] == 0:
                reader, name = open_newest(path)  # kept open, so it stays there
        name = agree(name, group)
        with raising_everywhere(*failures, group=group):
            reader = reader or open_same(path, name)
        assert reader is not None
        yield reader
    finally:
        if reader is not None:
            reader.close()


def check_same_checkpoint(reader: CheckpointReader, group: ProcessGroup | None) -> None:
    """CheckpointError on every rank unless all have opened the same one."""
    mine = (str(reader.path), reader.checksum)
    theirs: list = [None] * rank_and_size(group)[1]
    dist.all_gather_object(theirs, mine, group=group)
    for rank, (path, checksum) in enumerate(theirs):
        if checksum != theirs[0][1]:
            raise CheckpointError(
                f"ranks 0 and {rank} load different checkpoints: {theirs[0][0]} and "
                f"{path}"
            )


# A name that begins with ":" cannot be a parameter's.


def state_pieces(places: dict[Tensor, Place], states: States) -> list[Piece]:
    """The optimizer's state of each piece: cut as it is cut, or one number a piece."""
    pieces = []
    for piece, (name, shape, start) in places.items():
        for key, value in states.get(piece, {}).items():
            if not key or ":" in key:
                raise ValueError(f"{name} has state {key!r}: no ':' in its name")
            if value.dim() == 1 and value.shape == piece.shape:
                pieces.append(Piece(f":cut:{key}:{name}", shape, start, value))
            elif value.numel() == 1:
                pieces.append(Piece(f":number:{key}:{name}", (), 0, value.view(1)))
            else:
                raise ValueError(
                    f"{key} of {name} has shape {tuple(value.shape)}: neither its "
                    f"piece's {tuple(piece.shape)} nor one number"
                )
    return pieces


def saved_pieces(places: dict[Tensor, Place], saved: Saved) -> list[Piece]:
    """What `state_pieces` will ask for, before there is any state to fill."""
    return [
        Piece(f":cut:{key}:{name}", shape, start, piece)
        if kind.cut
        else Piece(f":number:{key}:{name}", (), 0, torch.empty(1))
        for piece, (name, shape, start) in places.items()
        for key, kind in saved.get(name, {}).items()
    ]


def saved_state(reader: CheckpointReader) -> Saved:
    """Which optimizer state a checkpoint has of which parameter.

    CheckpointError at a name that nothing saves, or state that does not fit.
    """
    saved: Saved = {}
    for label in reader.tensors:
        found = LABEL.fullmatch(label)
        if label.startswith(":") and found is None:
            raise CheckpointError(f"{reader.path} is damaged: what is {label!r}?")
        if found is None or found["name"] is None:
            continue
        shape, dtype = reader.about(label)
        cut, name = found["kind"] == "cut", found["name"]
        fits = shape == ()  # a number, perhaps of a parameter without elements
        if cut:
            fits = name in reader.tensors and shape == reader.about(name).shape
        if not fits:
            raise CheckpointError(f"{reader.path} is damaged: {label} fits no tensor")
        saved.setdefault(name, {})[found["key"]] = Kind(cut, dtype)
    return saved


# Of a parameter's state, or of a rank's random numbers
LABEL = re.compile(
    r":(?P<kind>cut|number):(?P<key>[^:]+):(?P<name>.+)|:random:[^:]+:[0-9]+", re.DOTALL
)


def empty_state(piece: Tensor, kinds: dict[str, Kind], on_device: bool) -> dict:
    """State to be filled; its numbers on the CPU or beside the piece."""
    device = piece.device if on_device else torch.device("cpu")
    return {
        key: torch.zeros_like(piece, dtype=kind.dtype, requires_grad=False)
        if kind.cut
        else torch.zeros((), dtype=kind.dtype, device=device)
        for key, kind in kinds.items()
    }


def wants_numbers_on_device(optimizer: Optimizer) -> bool:
    return any(
        group.get(key) for group in optimizer.param_groups for key in NUMBERS_ON_DEVICE
    )


NUMBERS_ON_DEVICE = ("fused", "capturable")


def group_options(optimizer: Optimizer | None) -> list[dict[str, Any]] | None:
    if optimizer is None:
        return None
    return [
        {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def check_groups(optimizer: Optimizer | None, reader: CheckpointReader) -> None:
    """CheckpointError unless the checkpoint has what such an optimizer needs."""
    extra, known = reader.extra, {"ranks", "groups", "user"}
    if not isinstance(extra, dict) or not known <= extra.keys():
        raise CheckpointError(f"{reader.path} is no checkpoint of a sharded model")
    saved = extra["groups"]
    if not is_count(extra["ranks"]) or not isinstance(saved, list | None):
        raise CheckpointError(f"{reader.path} is damaged: its groups or ranks")
    if optimizer is None:
        return
    if saved is None:
        raise CheckpointError(f"{reader.path} has no optimizer state")
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{reader.path} has {len(saved)} groups of parameters, the optimizer "
            f"{len(optimizer.param_groups)}"
        )

    for group, options in zip(optimizer.param_groups, saved, strict=True):
        if not isinstance(options, dict) or "params" in options:
            raise CheckpointError(f"{reader.path} is damaged: its groups' options")
        for key, value in options.items():
            number = isinstance(value, int | float)
            if isinstance(group.get(key), Tensor) and not number:
                raise CheckpointError(
                    f"{reader.path} has {key}={value!r}, the optimizer a tensor"
                )


def load_groups(optimizer: Optimizer, reader: CheckpointReader) -> None:
    """Give the optimizer's groups the options that were saved."""
    saved = reader.extra["groups"]
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def random_pieces(rank: int, states: dict[str, Tensor]) -> list[Piece]:
    return [
        Piece(f":random:{device}:{rank}", tuple(state.shape), 0, state)
        for device, state in states.items()
    ]


def read_random_states(reader: CheckpointReader, rank: int) -> dict[str, Tensor]:
    """The random states that a checkpoint has for this rank; none is set yet."""
    states = {
        device: torch.empty_like(state)
        for device, state in random_states().items()
        if f":random:{device}:{rank}" in reader.tensors
    }
    pieces = random_pieces(rank, states)
    for piece in pieces:
        shape, dtype = reader.about(piece.name)
        if shape != piece.shape or dtype != piece.data.dtype:
            raise CheckpointError(
                f"{reader.path}: {piece.name} is {list(shape)} of {dtype}, a random "
                f"state here {list(piece.shape)} of {piece.data.dtype}"
            )
    reader.read(pieces)
    if "cpu" in states:
        torch.Generator().set_state(states["cpu"])  # refuses what is none
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that the module's `state_dict` has; the others are made anew."""
    kept = module.state_dict().keys()
    return {name: t for name, t in module.named_buffers() if name in kept}
