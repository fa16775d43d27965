"""Sums over data ranks, once in a step, when a stage has its last gradient.

backwards of the schedule    inside no_sync(): gradients add up, nothing is sent
REDUCE of a stage            reduce_gradients() of what is around it
end of the step              what stages share over the pipeline, and what waited
"""

from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn

from xtrain.pipeline_parallel.shared import SharedGradients
from xtrain.pipeline_parallel.stage import GradientReduction, PipelineStage
from xtrain.pipeline_parallel.wrappers import reduces_shards


class Reductions:
    """What reduces the gradients of this rank's stages, and for which of them.

    Args:
        stages: this rank's.
        shared: sums what stages have in common over the pipeline.
    """

    def __init__(self, stages: Sequence[PipelineStage], shared: SharedGradients):
        self.stages, self.shared = list(stages), shared
        self.of = self._found()
        self._pending: dict[GradientReduction, set[int]] = {}

    def _found(self) -> dict[GradientReduction, set[int]]:
        found: dict[GradientReduction, set[int]] = {}
        for stage in self.stages:
            if stage.reduction is not None:
                found.setdefault(stage.reduction, set()).add(stage.index)
        return found

    def changed(self) -> str | None:
        """What has been done to the stages that a runner would not notice."""
        if self._found() != self.of:
            return "stages have been wrapped after they were handed to the runner"
        return None

    def parameters(self) -> list[nn.Parameter]:
        """All that may have gradients: the stages' own, and the shards ZeRO steps."""
        found = dict.fromkeys(p for stage in self.stages for p in stage.parameters())
        for reduction in self.of:
            for group in getattr(reduction, "param_groups", ()):
                found.update(dict.fromkeys(group["params"]))
        return list(found)

    def no_sync(self) -> ExitStack:
        """A step's backwards run in here: every wrapper waits for its `reduce`."""
        self._pending = {
            reduction: set(stages) for reduction, stages in self.of.items()
        }
        inside = ExitStack()
        for reduction in self.of:
            inside.enter_context(reduction.no_sync())
        return inside

    def reduce(self, index: int) -> None:
        """Sum a stage's gradients over the data ranks; it has its last gradient.

        What reduces several stages waits for the last of them. A `ZeroOptimizer` cuts
        gradients into shards of its own, so what stages share is summed before.
        """
        for reduction, waiting in list(self._pending.items()):
            waiting.discard(index)
            early = not (self.shared.exist and reduces_shards(reduction))
            if early and not waiting:
                del self._pending[reduction]
                reduction.reduce_gradients()

    def reduce_rest(self) -> None:
        """Sum what stages share, before or after it is summed over the data ranks."""
        self.shared.sum(of_sharded=True)
        for reduction in self._pending:
            reduction.reduce_gradients()
        self.shared.sum(of_sharded=False)
