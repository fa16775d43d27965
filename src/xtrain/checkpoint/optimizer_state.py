"""An optimizer's state as pieces: cut as its parameters are, or one number each.

    :cut:exp_avg:weight      a tensor of the parameter's shape, sharded as it is
    :number:step:weight      one number for the whole parameter

A name that begins with ":" cannot be a parameter's.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.pieces import Piece, Shard
from xtrain.checkpoint.reader import CheckpointReader
from xtrain.checkpoint.structure import is_count

States = dict[Tensor, dict[str, Tensor]]  # a shard's tensor -> name of the state


class StateSpec(NamedTuple):
    """What a checkpoint has of one state of one parameter."""

    sharded: bool  # as the parameter is; otherwise one number
    dtype: torch.dtype | None  # None: that of its parameter, there and so here


Saved = dict[str, dict[str, StateSpec]]  # parameter's name -> name of the state

# Of a parameter's state, or of a rank's random numbers
LABEL = re.compile(
    r":(?P<kind>cut|number):(?P<key>[^:]+):(?P<name>.+)|:random:[^:]+:[0-9]+", re.DOTALL
)
# A parameter without dims has state without dims: these of torch's are numbers.
NUMBERS = ("step", "mu_product", "mu", "eta")


def state_pieces(shards: list[Shard], states: States) -> list[Piece]:
    """The state of each shard: cut as it is cut, or one number."""
    pieces = []
    for shard in shards:
        tensor = shard.tensor
        for key, value in states.get(tensor, {}).items():
            if not key or ":" in key:
                raise ValueError(f"{shard.name} has state {key!r}: no ':' in its name")
            same = value.shape == tensor.shape
            if same and (tensor.dim() or key not in NUMBERS):
                pieces += shard.pieces(value, f":cut:{key}:{shard.name}")
            elif value.numel() == 1:
                pieces.append(number_piece(key, shard, value.reshape(())))
            else:
                raise ValueError(
                    f"{key} of {shard.name} has shape {tuple(value.shape)}: neither "
                    f"its shard's {tuple(tensor.shape)} nor one number"
                )
    return pieces


def saved_pieces(shards: list[Shard], saved: Saved) -> list[Piece]:
    """What `state_pieces` will ask for, before there is any state to fill."""
    pieces = []
    for shard in shards:
        for key, spec in saved.get(shard.name, {}).items():
            if spec.sharded:
                pieces += shard.pieces(name=f":cut:{key}:{shard.name}")
            else:
                pieces.append(number_piece(key, shard, torch.empty(())))
    return pieces


def number_piece(key: str, shard: Shard, value: Tensor) -> Piece:
    return Piece(f":number:{key}:{shard.name}", (), (), value)


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
        shape, dtype, _ = reader.about(label)
        sharded, name = found["kind"] == "cut", found["name"]
        fits = shape == ()  # a number, perhaps of a parameter without elements
        alike = False
        if sharded:
            fits = name in reader.tensors and shape == reader.about(name).shape
        if not fits:
            raise CheckpointError(f"{reader.path} is damaged: {label} fits no tensor")
        alike = sharded and dtype == reader.about(name).dtype
        spec = StateSpec(sharded, None if alike else dtype)
        saved.setdefault(name, {})[found["key"]] = spec
    return saved


def empty_state(
    tensor: Tensor, specs: dict[str, StateSpec], on_device: bool
) -> dict[str, Tensor]:
    """State to be filled; its numbers on the CPU or beside the tensor."""
    device = tensor.device if on_device else torch.device("cpu")
    return {
        key: torch.zeros_like(tensor, dtype=spec.dtype, requires_grad=False)
        if spec.sharded
        else torch.zeros((), dtype=spec.dtype, device=device)
        for key, spec in specs.items()
    }


def wants_numbers_on_device(optimizer: Optimizer) -> bool:
    return any(
        group.get(key) for group in optimizer.param_groups for key in NUMBERS_ON_DEVICE
    )


NUMBERS_ON_DEVICE = ("fused", "capturable")


def kind_of(optimizer: Optimizer | None) -> str | None:
    """What an optimizer is called."""
    return None if optimizer is None else type(optimizer).__name__


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
        raise CheckpointError(f"{reader.path} is not a checkpoint of a sharded model")
    saved = extra["groups"]
    if not is_count(extra["ranks"]) or not isinstance(saved, list | None):
        raise CheckpointError(f"{reader.path} is damaged: its groups or ranks")
    if optimizer is None:
        return
    if saved is None:
        raise CheckpointError(f"{reader.path} has no optimizer state")
    kind, other = kind_of(optimizer), extra.get("optimizer", kind_of(optimizer))
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{reader.path} has {len(saved)} groups of parameters, the optimizer "
            f"{len(optimizer.param_groups)}: {other} and {kind}"
        )
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        if not isinstance(options, dict) or "params" in options:
            raise CheckpointError(f"{reader.path} is damaged: its groups' options")
        differing = sorted(options.keys() ^ (group.keys() - {"params"}))
        if kind != other and differing:
            raise CheckpointError(
                f"{reader.path} is of optimizer {other!r}, which does not fit {kind}: "
                f"one has no {differing[0]}"
            )
        for key, value in options.items():
            here = group.get(key)
            if not is_like(value, here):
                wanted = "a tensor" if isinstance(here, Tensor) else repr(here)
                raise CheckpointError(
                    f"{reader.path} has {key}={value!r}, the optimizer {wanted}"
                )


def is_like(value: object, here: object) -> bool:
    """Whether a group may have this value in place of the one it has."""
    if isinstance(here, tuple | list):
        if not isinstance(value, list) or len(value) != len(here):
            return False
        return all(is_like(v, h) for v, h in zip(value, here, strict=True))
    if isinstance(here, bool) or here is None:  # may be left open
        return isinstance(value, bool | int | float | None)
    if isinstance(here, int | float | Tensor):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return True


def load_groups(optimizer: Optimizer, reader: CheckpointReader) -> None:
    """Give the optimizer's groups the options that were saved."""
    saved = reader.extra["groups"]
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
