"""The shapes of parameters: of the whole model, and of what a rank holds of it."""

from collections.abc import Sequence

import torch

from xtrain.checkpoint import CheckpointError
from xtrain.model.config import XtrainConfig
from xtrain.model.decoder import XtrainModel
from xtrain.model.span import DecoderSpan


def whole_shapes(config: XtrainConfig) -> dict[str, torch.Size]:
    """Every parameter of the whole model, in order, with its shape."""
    try:
        whole = XtrainModel(config, device="meta")
    except (RuntimeError, TypeError) as error:  # of sizes whose product is too large
        raise ValueError(f"sizes that no tensor has: {error}") from None
    return {name: parameter.shape for name, parameter in whole.named_parameters()}


def check_counts(config: XtrainConfig, tensors: int) -> None:
    """CheckpointError if files have too few tensors for the layers and experts of a
    config: seen at once, where to list what is missing takes as long as they are many.
    """
    layers, experts = config.num_hidden_layers, config.num_local_experts
    if layers * max(1, experts) > tensors:
        raise CheckpointError(
            f"config.json has num_hidden_layers={layers}, num_local_experts={experts}, "
            f"but the files have {tensors} tensors"
        )


def check_own_shapes(
    modules: Sequence[DecoderSpan], shapes: dict[str, torch.Size]
) -> None:
    """ValueError if parameters are no longer the model's, as inside FSDP."""
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
