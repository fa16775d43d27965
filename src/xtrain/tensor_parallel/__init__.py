"""lc4: tensor and sequence parallelism: layers cut over the ranks of a group."""

from xtrain.tensor_parallel.attention import ParallelAttention
from xtrain.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from xtrain.tensor_parallel.embedding import (
    HiddenParallelEmbedding,
    VocabParallelEmbedding,
)
from xtrain.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from xtrain.tensor_parallel.mlp import ParallelSwiGLU
from xtrain.tensor_parallel.norm import ParallelRMSNorm

__all__ = [
    "ColumnParallelLinear",
    "HiddenParallelEmbedding",
    "ParallelAttention",
    "ParallelRMSNorm",
    "ParallelSwiGLU",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]
