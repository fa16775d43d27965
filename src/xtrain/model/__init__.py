"""A Llama-style decoder on one device: the model that all lectures cut up."""

from xtrain.model.config import RopeScaling, XtrainConfig
from xtrain.model.decoder import XtrainModel

__all__ = ["RopeScaling", "XtrainConfig", "XtrainModel"]
