"""What each rank holds of a model with experts, for the page on the whole model."""

from typing import Any

import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.placement import is_of_experts, is_summed_over

CONFIG = XtrainConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_local_experts=8,
    num_experts_per_tok=2,
)
AXES = ("expert_data", "expert", "tensor")


def held(expert_data: int, expert: int, tensor: int) -> dict[str, Any]:
    """Shapes of this rank's parameters, the whole ones, and who sums their gradients.

    Args:
        expert_data, expert, tensor: the sizes of the axes.
    """
    sizes = (expert_data, expert, tensor)
    model = XtrainModel(CONFIG, init_mesh(sizes, AXES))
    whole = dict(XtrainModel(CONFIG).named_parameters())
    found = {
        name: {
            "shape": list(parameter.shape),
            "whole": list(whole[name].shape),
            "axes": [axis for axis in AXES if is_summed_over(name, axis)],
            "experts": is_of_experts(name),
        }
        for name, parameter in model.named_parameters()
    }
    return {"rank": dist.get_rank(), "parameters": found}
