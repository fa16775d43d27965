"""lc5: stages of a model, and a runner for any schedule of them."""

from xtrain.pipeline_parallel.cut import balanced_cut
from xtrain.pipeline_parallel.messages import RankLost
from xtrain.pipeline_parallel.runner import PipelineRunner
from xtrain.pipeline_parallel.stage import GradientReduction, PipelineStage

__all__ = [
    "GradientReduction",
    "PipelineRunner",
    "PipelineStage",
    "RankLost",
    "balanced_cut",
]
