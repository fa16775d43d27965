"""The gradients of a step: summed over data ranks, divided by the count, added.

backwards of the schedule    inside no_sync(): gradients add up, nothing is sent
REDUCE of a stage            reduce_gradients() of what is around it
end of the step              what stages share over the pipeline, and what waited;
                             then what tensor ranks have parts of
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.main_grad import add_to_gradient, leave_gradient, unround
from xtrain.comm.wrapper_rules import mark_as_summed, summed_over
from xtrain.pipeline_parallel.shared import (
    SharedGradients,
    first_stage,
    held_by_name,
)
from xtrain.pipeline_parallel.stage import (
    GradientReduction,
    PartialGradients,
    PipelineStage,
)
from xtrain.pipeline_parallel.torch_wrappers import TorchFSDP, TorchWrapper
from xtrain.schedules import Schedule


class Reductions:
    """What reduces the gradients of this rank's stages, and for which of them."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        schedule: Schedule,
        group: ProcessGroup | None,
    ):
        self.stages = list(stages)
        for stage in stages:
            if isinstance(stage.reduction, TorchFSDP):
                stage.reduction.reshard()  # its parameters are the shards
        self._own = dict.fromkeys(p for s in stages for p in s.parameters())
        sharded = {
            parameter
            for stage in stages
            if reduces_shards(stage.reduction)
            for parameter in stage.parameters()
        }
        held = held_by_name(stages, schedule.placement == "mirror")
        early = first_stage(schedule, rank_and_size(group)[0])
        self.shared = SharedGradients(held, group, sharded, early)
        self.of = self._found()
        self._partial = [
            part
            for stage in stages
            for part in stage.module.modules()
            if isinstance(part, PartialGradients)
        ]
        for parameter in (p for part in self._partial for p in part.parameters()):
            axes = {*summed_over(parameter), "tensor"}  # so that nothing else does
            mark_as_summed([parameter], tuple(sorted(axes)))
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
        found = dict(self._own)
        for reduction in self.of:
            for group in getattr(reduction, "param_groups", ()):
                found.update(dict.fromkeys(group["params"]))
        return list(found)

    def no_sync(self) -> ExitStack:
        """A step's backwards run in here: every wrapper waits for its `reduce`."""
        self.shared.reset()
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
        late = [r for r in self._pending if index in self.of[r]]
        if all(map(reduces_shards, late)):
            self.shared.begin(index)

    def reduce_rest(self) -> None:
        """Sum what stages share, before or after it is summed over the data ranks."""
        self.shared.sum(of_sharded=True)
        for reduction in self._pending:
            reduction.reduce_gradients()
        self.shared.sum(of_sharded=False)

    def sum_partial(self) -> None:
        """Sum what tensor ranks have parts of; when no rank has failed."""
        for part in self._partial:
            part.sum_partial_gradients()


class PreviousGradients:
    """The gradients from before a step, kept apart until the step is over.

    grad    before | None, then the sums of the step | before + sums / count
                   | a step that fails               | before
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.before = {p: kept(unround(p)) for p in parameters}
        for parameter in self.before:
            parameter.grad = None

    def put_back(self) -> None:
        """Give the parameters what they had; the step's gradients are dropped."""
        for parameter, old in self.before.items():
            parameter.grad = None
            if old is not None:
                leave_gradient(parameter, old)

    @torch.no_grad()
    def add(self, count: Tensor) -> None:
        """Divide the step's gradients by the count, and add what was there before."""
        for parameter, old in self.before.items():
            new = unround(parameter)
            if new is not None:
                new.div_(count.to(new.device))
            parts = [part for part in (old, new) if part is not None]
            parameter.grad = None
            for part in parts:
                add_to_gradient(parameter, part)


def kept(gradient: Tensor | None) -> Tensor | None:
    """A gradient that stays while others are summed: DDP's is a view of its bucket."""
    if type(gradient) is Tensor and gradient._base is not None:
        return gradient.clone()
    return gradient


def reduces_shards(reduction: Any) -> bool:
    """Whether it cuts whole gradients into shards of its own, as ZeRO 1 and 2 do."""
    return not isinstance(reduction, nn.Module | TorchWrapper | None)
