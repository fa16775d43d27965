"""Pipeline parallelism: stages of a model, and a runner for any schedule of them."""

from xtrain.pipeline_parallel.recompute import checkpoint
from xtrain.pipeline_parallel.split_backward import SplitBackward, split_backward
from xtrain.pipeline_parallel.stage import GradientReduction, PipelineStage

__all__ = [
    "GradientReduction",
    "PipelineStage",
    "SplitBackward",
    "checkpoint",
    "split_backward",
]
