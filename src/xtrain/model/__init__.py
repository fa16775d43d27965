"""A Llama-style decoder, dense or with experts, whole or cut over a mesh."""

from xtrain.model.config import XtrainConfig
from xtrain.model.decoder import XtrainModel
from xtrain.model.hf_load import load_hf, load_hf_stages
from xtrain.model.hf_save import save_hf
from xtrain.model.mesh_axes import batch_group
from xtrain.model.stage_gradients import (
    clip_stages_grad_norm_,
    update_stages_balance_biases,
)
from xtrain.tensor_parallel.rope import RopeScaling

__all__ = [
    "RopeScaling",
    "XtrainConfig",
    "XtrainModel",
    "batch_group",
    "clip_stages_grad_norm_",
    "load_hf",
    "load_hf_stages",
    "save_hf",
    "update_stages_balance_biases",
]
