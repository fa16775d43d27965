"""lc5: stages of a model, and a runner for any schedule of them."""

from xtrain.pipeline_parallel.cut import balanced_cut
from xtrain.pipeline_parallel.lost_ranks import RankLost
from xtrain.pipeline_parallel.recompute import checkpoint
from xtrain.pipeline_parallel.runner import PipelineRunner
from xtrain.pipeline_parallel.split_backward import SplitBackward, split_backward
from xtrain.pipeline_parallel.stage import GradientReduction, PipelineStage

__all__ = [
    "GradientReduction",
    "PipelineRunner",
    "PipelineStage",
    "RankLost",
    "SplitBackward",
    "balanced_cut",
    "checkpoint",
    "split_backward",
]
