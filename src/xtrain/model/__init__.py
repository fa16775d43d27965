"""A Llama-style decoder, whole or cut over a mesh: the model of all lectures."""

from xtrain.model.config import XtrainConfig
from xtrain.model.decoder import XtrainModel
from xtrain.model.hf import load_hf, save_hf
from xtrain.model.stages import clip_stages_grad_norm_
from xtrain.tensor_parallel.rope import RopeScaling

__all__ = [
    "RopeScaling",
    "XtrainConfig",
    "XtrainModel",
    "clip_stages_grad_norm_",
    "load_hf",
    "save_hf",
]
