"""lc3: Adam, mixed precision and the three stages of ZeRO."""

from xtrain.zero.adam import Adam, AdamW
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.flat import FlatLayout
from xtrain.zero.fsdp import FullyShardedDataParallel
from xtrain.zero.hybrid import hybrid_groups
from xtrain.zero.mixed_precision import LossScaler, MixedPrecisionOptimizer
from xtrain.zero.muon import Muon
from xtrain.zero.muon_layout import hidden_matrices, matrix_layout
from xtrain.zero.newton_schulz import newton_schulz
from xtrain.zero.optimizer import ZeroOptimizer

__all__ = [
    "Adam",
    "AdamW",
    "FlatLayout",
    "FullyShardedDataParallel",
    "LossScaler",
    "MixedPrecisionOptimizer",
    "Muon",
    "ZeroOptimizer",
    "clip_sharded_grad_norm_",
    "hidden_matrices",
    "hybrid_groups",
    "matrix_layout",
    "newton_schulz",
]
