"""Under which names a published file has our parameters, and in which shapes.

    lm_head.weight                    lm_head.weight
    layers.0.self_attn.q_proj.weight  model.layers.0.self_attn.q_proj.weight
    layers.0.mlp.router.weight        model.layers.0.block_sparse_moe.gate.weight
    layers.0.mlp.experts.gate_proj
      [E, F, H]                      model.layers.0.block_sparse_moe.experts.0.w1.weight
                                     to experts.{E - 1}.w1.weight

The last two are those that `transformers` itself saves of a Mixtral: a tensor for each
matrix of each expert, where we keep those of all experts as one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from xtrain.checkpoint import CheckpointError
from xtrain.checkpoint.boxes import Box
from xtrain.checkpoint.pieces import Piece
from xtrain.model.config import XtrainConfig
from xtrain.model.decoder import XtrainModel
from xtrain.model.decoder_parts import DecoderParts

MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
MOE = ".block_sparse_moe."


class Source(NamedTuple):
    """The origin of a tensor of a file: a parameter of ours, or one expert of it."""

    parameter: str
    expert: int | None
    shape: torch.Size


def hf_name(name: str, expert: int | None = None) -> str:
    """The name in a file of our parameter `name`, or of one expert of it."""
    if name.startswith("lm_head."):
        return name
    parent, _, last = name.rpartition(".")
    if expert is not None:
        last = f"{expert}.{MATRICES[last]}.weight"
    own = f"{parent}.{last}".replace(".mlp.router.", f"{MOE}gate.")
    return "model." + own.replace(".mlp.experts.", f"{MOE}experts.")


def hf_sources(config: XtrainConfig) -> dict[str, Source]:
    """Every tensor of a checkpoint, in the order of our parameters.

    Files have no rows that pad the vocabulary.
    """
    found = {}
    shapes = whole_shapes(replace(config, padded_vocab_size=None))
    for name, shape in shapes.items():
        if is_stacked(name):
            for expert in range(shape[0]):
                source = Source(name, expert, shape[1:])
                found[hf_name(name, expert)] = source
        else:
            found[hf_name(name)] = Source(name, None, shape)
    return found


def is_stacked(name: str) -> bool:
    """Whether our parameter `name` has a matrix of each expert."""
    return ".mlp.experts." in name


def tensors_of(piece: Piece) -> list[tuple[str, Box, torch.Tensor]]:
    """What a piece of our parameter is made of: names in a file, and boxes in them."""
    if not is_stacked(piece.name):
        return [(hf_name(piece.name), piece.box, piece.data)]
    first, *offset = piece.offset
    return [
        (hf_name(piece.name, first + row), Box(tuple(offset), tuple(data.shape)), data)
        for row, data in enumerate(piece.data)
    ]


def whole_shapes(config: XtrainConfig) -> dict[str, torch.Size]:
    """Every parameter of the whole model, in order, with its shape."""
    try:
        whole = XtrainModel(config, device="meta")
    except (RuntimeError, TypeError) as error:  # of sizes whose product is too large
        raise ValueError(f"sizes that no tensor has: {error}") from None
    return {name: parameter.shape for name, parameter in whole.named_parameters()}


def check_counts(config: XtrainConfig, tensors: int) -> None:
    """CheckpointError if files have too few tensors for the layers and experts of a
    config: checked first, as listing all that are missing may take long.
    """
    layers, experts = config.num_hidden_layers, config.num_local_experts
    if layers * max(1, experts) > tensors:
        raise CheckpointError(
            f"config.json has num_hidden_layers={layers}, num_local_experts={experts}, "
            f"but the files have {tensors} tensors"
        )


def check_own_shapes(
    modules: Sequence[DecoderParts], shapes: dict[str, torch.Size]
) -> None:
    """ValueError if parameters have other shapes than the model's, as inside FSDP."""
    for module in modules:
        for name, parameter in module.named_parameters():
            full = torch.empty(shapes[name], device="meta")
            shape = module.placement(name).of(full).shape
            if parameter.shape != shape:
                raise ValueError(
                    f"{name} has shape {list(parameter.shape)} and not {list(shape)}: "
                    "a wrapper has sharded it, so load its full_state_dict into a bare "
                    "model"
                )
