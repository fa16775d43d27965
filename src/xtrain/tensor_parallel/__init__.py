"""lc4: tensor and sequence parallelism: layers cut over the ranks of a group."""

from xtrain.tensor_parallel.attention import ParallelAttention
from xtrain.tensor_parallel.attention_dropout import DropoutAttention
from xtrain.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from xtrain.tensor_parallel.dropout import (
    ParallelDropout,
    parallel_dropout,
    rank_rng,
)
from xtrain.tensor_parallel.embedding import (
    HiddenParallelEmbedding,
    VocabParallelEmbedding,
)
from xtrain.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from xtrain.tensor_parallel.mlp import AllGatherMLP, ParallelSwiGLU
from xtrain.tensor_parallel.norm import ParallelRMSNorm
from xtrain.tensor_parallel.ring_matmul import (
    ring_all_gather_matmul,
    ring_matmul_reduce_scatter,
)

__all__ = [
    "AllGatherMLP",
    "ColumnParallelLinear",
    "DropoutAttention",
    "HiddenParallelEmbedding",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelRMSNorm",
    "ParallelSwiGLU",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "parallel_dropout",
    "rank_rng",
    "ring_all_gather_matmul",
    "ring_matmul_reduce_scatter",
    "vocab_parallel_cross_entropy",
]
