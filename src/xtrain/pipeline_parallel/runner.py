"""Run any schedule: the same lists that are checked, simulated and drawn.

    rank 0   0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0BW0 0RECV_B1 0BW1 0REDUCE
    rank 1   1RECV_F0 1F0 1BW0 1SEND_B0 1RECV_F1 1F1 1BW1 1SEND_B1 1REDUCE

A step is one walk through this rank's list. The loss of a micro-batch is a sum, and
gradients are added up; when all is over, the sums are divided once by the count of the
whole batch, so micro-batches may be of any size.

A rank that fails stops computing but sends what others expect: at the end of the step
all ranks raise the same error, and their group can still be used.

Sources: Huang et al., GPipe, 2019; Narayanan et al., Megatron-LM, 2021; Qi et al., Zero
Bubble Pipeline Parallelism, 2023; DeepSeek-AI, DeepSeek-V3, 2024.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import digest
from xtrain.comm.autocast import autocast_dtype
from xtrain.comm.checks import rank_and_size
from xtrain.comm.main_grad import accumulate_in_fp32
from xtrain.pipeline_parallel.agreement import agree_to_begin, sums_of_all
from xtrain.pipeline_parallel.checks import (
    check_batch,
    check_mode,
    check_pipeline,
    device_of,
    needs_stage,
    rows_of,
)
from xtrain.pipeline_parallel.computations import Computations
from xtrain.pipeline_parallel.executor import Executor
from xtrain.pipeline_parallel.gradients import PreviousGradients, Reductions
from xtrain.pipeline_parallel.loss import LossFunction, StepLoss
from xtrain.pipeline_parallel.lost_ranks import clear_store
from xtrain.pipeline_parallel.messages import Messages, messages_of
from xtrain.pipeline_parallel.micro_batch import own_micro_batches
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.pipeline_parallel.torch_wrappers import TorchWrapper
from xtrain.schedules import Action, Schedule


def sum_in_fp32(stages: Sequence[PipelineStage], choice: bool | None) -> None:
    """`accumulate_in_fp32` of all stages but those under wrappers of torch's."""
    for stage in stages:
        torchs = isinstance(stage.reduction, TorchWrapper)
        accumulate_in_fp32(stage.parameters(), False if torchs else choice)


Batch = Tensor | Sequence[Tensor] | None


class PipelineRunner:
    """Trains the stages of a pipeline, one of whose ranks this is.

    Args:
        stages: this rank's, in the order of `schedule.stages_of(rank)`.
        loss_fn: (output, target) of a micro-batch -> (sum, count): the loss is the sum
            of the sums over the sum of the counts. Called where the last stage is.
        group: the ranks of the pipeline.
        data_group: the ranks that have the same stages and bring other batches: the
            loss and the count are those of all of them. Gradients are summed by what
            the stages are wrapped in, with `gradient_reduction="sum"`, after the last
            gradient of each stage; or by the caller, after `step`.
        fp32_gradients: add up the gradients of 16-bit parameters in fp32, see
            `xtrain.comm.main_grad`. On unless False, or a wrapper was told False, or a
            wrapper of torch's reduces them, which takes the dtype of the parameters.

    Raises:
        ValueError: on every rank: the stages are not those of the schedule, or ranks
            have different schedules, or a wrapper cannot reduce as a pipeline needs.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: Schedule,
        loss_fn: LossFunction,
        group: ProcessGroup | None = None,
        *,
        data_group: ProcessGroup | None = None,
        fp32_gradients: bool | None = None,
    ):
        several = isinstance(stages, list | tuple | nn.ModuleList)
        own: list[PipelineStage] = list(stages) if several else [stages]  # type: ignore
        clear_store()  # of what this rank wrote about an earlier pipeline
        check_pipeline(own, schedule, loss_fn, group, data_group)
        self.rank = rank_and_size(group)[0]
        self.stages = {stage.index: stage for stage in own}
        self.schedule, self.loss_fn = schedule, loss_fn
        self.group, self.data_group = group, data_group
        self.parameters = list(dict.fromkeys(p for s in own for p in s.parameters()))
        sum_in_fp32(own, fp32_gradients)
        self._reductions = Reductions(own, schedule, group)
        self._messages, self._forwards = messages_of(schedule, group, device_of(own))
        self._needs_inputs = needs_stage(schedule, 0, self.rank)
        self._needs_targets = needs_stage(schedule, schedule.stages - 1, self.rank)
        self._failed = False
        self.executed: list[Action] = []
        """What the last call did, in order, messages included."""
        self.times: list[tuple[float, float]] = []
        """When each of these began and ended, by `time.perf_counter`."""
        self.peak_activations = 0.0
        """The most micro-batches of its whole part that this rank held at a time."""

    def step(self, inputs: Batch, targets: Batch) -> Tensor:
        """Forward and backward of a batch; the mean loss, the same on every rank.

        Gradients are added to what the parameters have, as `backward` does.

        Args:
            inputs: a tensor or several, cut along dimension 0 into micro-batches;
                needed where stage 0 is. Other ranks may pass None.
            targets: likewise, for `loss_fn`; needed where the last stage is.

        Raises:
            ValueError: on every rank, before anything is computed: a batch is missing
                or too small.
            ValueError, RuntimeError: on every rank, at the end: a stage has failed
                somewhere, or has changed the shape of what it returns.
            RankLost: a rank has ended; the message names it.

        After an error the parameters have the gradients from before the step.
        """
        problem = check_mode(self._messages.device.type) or self._reductions.changed()
        step = self._begin(self._messages, self.loss_fn, inputs, targets, problem)
        before = PreviousGradients(self._reductions.parameters())
        try:
            with torch.enable_grad(), self._reductions.no_sync():
                step.run()
                with step.failure.caught("the sum of gradients", reducing=True):
                    self._reductions.reduce_rest()
            total, count = self._end(step)
            self._reductions.sum_partial()
        except BaseException:
            before.put_back()
            raise
        before.add(count)
        return total / count

    @torch.no_grad()
    def evaluate(self, inputs: Batch, targets: Batch) -> Tensor:
        """The mean loss that `step` would return; no backward, no gradients."""
        step = self._begin(self._forwards, self.loss_fn, inputs, targets)
        step.run()
        total, count = self._end(step)
        return total / count

    @torch.no_grad()
    def forward(self, inputs: Batch) -> list[Any]:
        """What the last stage returns for each micro-batch that ends on this rank."""
        step = self._begin(self._forwards, None, inputs, None)
        step.run()
        self._end(step)
        outputs = step.computations.loss.outputs
        return [outputs[i] for i in sorted(outputs)]

    def _begin(
        self,
        messages: Messages,
        loss_fn: LossFunction | None,
        inputs: Batch,
        targets: Batch,
        problem: str | None = None,
    ) -> Executor:
        """A step with its micro-batches, when all ranks are ready for it."""
        m, needed = self.schedule.micro_batches, []
        if self._needs_inputs:
            needed.append(inputs)
            problem = problem or check_batch("inputs", inputs, m)
        if self._needs_targets and loss_fn is not None:
            needed.append(targets)
            problem = problem or check_batch("targets", targets, m)
        rows = [] if problem else [rows_of(batch) for batch in needed]
        known = digest(None if problem else self._shapes(inputs))
        signature = agree_to_begin(problem, rows, known, self.group, self.data_group)
        negotiate = messages.signature != signature
        if negotiate:
            self._reductions.shared.check_equal()
        messages.begin(negotiate)
        messages.signature = signature
        own = partial(own_micro_batches, schedule=self.schedule, rank=self.rank)
        loss = StepLoss(loss_fn, own(targets, self.schedule.stages - 1))
        computations = Computations(self.stages, messages, loss, own(inputs, 0))
        return Executor(computations, messages, self._reductions.reduce)

    def _end(self, step: Executor) -> tuple[Tensor, Tensor]:
        """The sum of the loss and the count (at least 1) of all ranks."""
        self.executed, self.times = step.executed, step.times
        self.peak_activations = step.computations.peak / self.schedule.chunks
        loss, failure = step.computations.loss, step.failure
        if problem := loss.wrong_count():
            stage = self.schedule.stages - 1
            failure.keep(ValueError(f"stage {stage}: {problem}"))
        try:
            total, count = sums_of_all(
                loss.total, loss.count, failure.error, self.group, self.data_group
            )
        except (ValueError, RuntimeError):  # on every rank
            # what was agreed need not be what was sent
            self._messages.signature = self._forwards.signature = None
            self._failed = self._failed or failure.error is not None
            raise
        if self._failed:
            self._failed = False
            clear_store()  # this step worked
        return total, count.clamp(min=1)

    def _shapes(self, inputs: Batch) -> object:
        """What decides on the shapes of all messages, as far as this rank has it."""
        own = inputs if self._needs_inputs and inputs is not None else ()
        tensors = [own] if isinstance(own, Tensor) else list(own)
        return (
            [(tuple(t.shape), t.dtype) for t in tensors],
            [p.requires_grad for p in self.parameters],
            [stage.module.training for stage in self.stages.values()],
            autocast_dtype(self._messages.device.type),
        )
