"""Pipeline parallelism: stages of a model, and a runner for any schedule of them."""

from xtrain.pipeline_parallel.cut import balanced_cut
from xtrain.pipeline_parallel.stage import GradientReduction, PipelineStage

__all__ = ["GradientReduction", "PipelineStage", "balanced_cut"]
