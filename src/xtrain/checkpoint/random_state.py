"""Each rank's random state as pieces of a checkpoint."""

import torch
from torch import Tensor

from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.pieces import Piece
from xtrain.checkpoint.reader import CheckpointReader
from xtrain.comm.accelerator import accelerator_in_use


def random_states() -> dict[str, Tensor]:
    """Those of the CPU and, where this process has used one, of its accelerator."""
    states = {"cpu": torch.get_rng_state()}
    device, module = accelerator_in_use()
    if module is not None:
        states[device] = module.get_rng_state()
    return states


def random_pieces(rank: int, states: dict[str, Tensor]) -> list[Piece]:
    return [
        Piece(f":random:{device}:{rank}", tuple(state.shape), (0,), state)
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
        shape, dtype, _ = reader.about(piece.name)
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
    for device, state in states.items():
        module = torch if device == "cpu" else torch.get_device_module(device)
        module.set_rng_state(state)
