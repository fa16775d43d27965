"""lc2: data parallelism, from one all-reduce a parameter to overlapped buckets."""

from xtrain.data_parallel.ddp import DistributedDataParallel
from xtrain.data_parallel.naive import NaiveDataParallel
from xtrain.data_parallel.replicas import check_replicas
from xtrain.data_parallel.sampler import DistributedSampler

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "NaiveDataParallel",
    "check_replicas",
]
