"""lc3: Adam, mixed precision and the three stages of ZeRO."""

from xtrain.zero.adam import Adam, AdamW
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.flat import FlatLayout
from xtrain.zero.fsdp import FullyShardedDataParallel
from xtrain.zero.mixed_precision import LossScaler, MixedPrecisionOptimizer
from xtrain.zero.optimizer import ZeroOptimizer

__all__ = [
    "Adam",
    "AdamW",
    "FlatLayout",
    "FullyShardedDataParallel",
    "LossScaler",
    "MixedPrecisionOptimizer",
    "ZeroOptimizer",
    "clip_sharded_grad_norm_",
]
