"""One step of a pipeline's rank: everything that lives no longer than that.

    stage 0          stage 1          stage 2 (last)
    F0 -> outputs -> F0 -> outputs -> F0 -> loss_fn -> sum, count
    BW0 <-- gradients -- BW0 <-- gradients -- BW0

What one stage hands to the next waits in `_ready` if that is on the same rank, and in
`_outgoing` for its SEND if it is not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from xtrain.comm.agreement import text_of
from xtrain.comm.lost import is_of_transport, is_timeout
from xtrain.pipeline_parallel.agreement import NothingArrived, NotReduced
from xtrain.pipeline_parallel.likes import as_words, check_sendable, likes_of
from xtrain.pipeline_parallel.lost import (
    RankLost,
    naming_lost_ranks,
    tell_failure,
)
from xtrain.pipeline_parallel.messages import Messages
from xtrain.pipeline_parallel.micro_batch import MicroBatch, as_tuple, received
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.schedules import Action
from xtrain.schedules.action import REDUCE

Key = tuple[str, int, int]
LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor | int]]


class Step:
    """Does a rank's actions one after the other.

    Args:
        stages: this rank's, by index.
        messages: of the schedule, which has them.
        loss_fn: (output, target) -> (sum, count); outputs are kept if there is none.
        splits: (stage, micro-batch) whose backward comes in two parts.
        reduce: sums a stage's gradients over the data ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        messages: Messages,
        loss_fn: LossFunction | None,
        splits: set[tuple[int, int]],
        reduce: Callable[[int], None],
    ):
        self.stages, self.messages, self.loss_fn = stages, messages, loss_fn
        self.schedule, self._splits, self._reduce = messages.schedule, splits, reduce
        self._ready: dict[Key, tuple[Tensor, ...]] = {}
        self._outgoing: dict[Key, tuple[Tensor, ...]] = {}
        self._targets: dict[int, Any] = {}
        self._live: dict[tuple[int, int], MicroBatch] = {}
        self._waiting: dict[tuple[int, int], MicroBatch] = {}  # for their W
        self.outputs: dict[int, Any] = {}
        self.total: Tensor | float = 0.0
        self.count: Tensor | int = 0
        self._counts: list[Tensor | int] = []
        self.peak = 0
        self.failure: Exception | None = None
        self.executed: list[Action] = []
        self.times: list[tuple[float, float]] = []

    def load(self, inputs: Any, targets: Any) -> None:
        """Take this rank's micro-batches of the whole batch."""
        rank, m = self.messages.rank, self.schedule.micro_batches
        last = self.schedule.stages - 1
        for i, rows in enumerate(micro_batches(inputs, m)):
            if self.schedule.rank_of(0, i) == rank:
                self._ready["F", 0, i] = as_tuple(rows, "the input")
        for i, rows in enumerate(micro_batches(targets, m)):
            if self.schedule.rank_of(last, i) == rank:
                self._targets[i] = rows

    def run(self) -> None:
        """Do everything; what fails is left in `failure`, and others do not wait."""
        for action in self.schedule.actions[self.messages.rank]:
            begin = time.perf_counter()
            if action.kind in ("SEND_F", "SEND_B"):
                key = action.kind[-1], action.stage, action.micro_batch
                self.messages.send(action, self._outgoing.pop(key, None))
            elif action.kind in ("RECV_F", "RECV_B"):
                self._take(action, self.messages.recv(action))
            elif action.kind == REDUCE or self.failure is None:
                self._try(action)
            else:
                continue
            self.executed.append(action)
            self.times.append((begin, time.perf_counter()))
        self.messages.finish()
        self._check_counts()

    def _take(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        key = action.kind[-1], action.stage, action.micro_batch
        self._ready[key] = tensors
        if self.messages.has_failed(action) and self.failure is None:
            self.failure = NothingArrived()

    def attempt(self, reduce: Callable[[], None]) -> None:
        """Reduce, also after a failure: the other data ranks wait for it."""
        try:
            reduce()
        except RankLost:
            raise
        except (ValueError, RuntimeError) as error:
            self._end_if_lost(error, "the sum of gradients", NotReduced)
            self.failure = self.failure or NotReduced(text_of(error))

    def _try(self, action: Action) -> None:
        """Do it; the first error of this rank is its `failure`."""
        try:
            if action.kind == REDUCE:
                self._reduce(action.stage)
            else:
                self._compute(action)
        except RankLost:
            raise
        except Exception as error:
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            if action.kind == REDUCE:
                kind = NotReduced
            self._end_if_lost(error, action, kind)
            name = "" if kind is type(error) else f"{type(error).__name__}: "
            if self.failure is None:
                text = f"{action}, stage {action.stage}: {name}{text_of(error)}"
                tell_failure(text)  # to those that wait for this rank in its stage
                self.failure = kind(text)
                self.failure.__cause__ = error

    def _end_if_lost(self, error: Exception, at: object, kind: type[Exception]) -> None:
        """RankLost if a stage lost a rank: its groups are of no more use.

        A rank that ended while gradients were summed is named at the end of the step.
        """
        if is_of_transport(error) and (is_timeout(error) or kind is not NotReduced):
            with naming_lost_ranks(None, self.messages.group, at):
                raise error

    def _compute(self, action: Action) -> None:
        if action.under is not None:
            self._pair(action, action.under)
        elif action.kind == "F":
            self._run_forward(action, self._alone(action))
        elif action.kind == "W":
            key = action.stage, action.micro_batch
            self._waiting.pop(key).backward_weight()
        else:
            micro_batch = self._begin_backward(action)
            if action.kind == "B":
                micro_batch.backward_input()
                self._waiting[action.stage, action.micro_batch] = micro_batch
            else:
                micro_batch()
            self._end_backward(action, micro_batch)

    def _pair(self, action: Action, under: Action) -> None:
        """A forward and a backward; its module runs one into the other if it can.

        A stage that computes its forward again is run as a whole.
        """
        backward = self._begin_backward(under)
        stage = self.stages[action.stage]
        overlapped = getattr(stage.module, "forward_with_backward", None)
        if overlapped is None or stage.recompute:
            self._run_forward(action, stage)
            backward()
        else:
            self._run_forward(action, lambda *inputs: overlapped(inputs, backward))
        self._end_backward(under, backward)

    def _alone(self, action: Action) -> Callable[..., Any]:
        """What runs a forward that is in no pair, if its backward may be in one."""
        stage, key = self.stages[action.stage], (action.stage, action.micro_batch)
        in_pieces = getattr(stage.module, "forward_in_pieces", None)
        if in_pieces is None or stage.recompute or key in self._splits:
            return stage
        return in_pieces if torch.is_grad_enabled() else stage

    def _run_forward(self, action: Action, module: Callable[..., Any]) -> None:
        _, stage, i, _ = action
        inputs = self._ready.pop(("F", stage, i))
        trains = torch.is_grad_enabled()
        splits = trains and (stage, i) in self._splits
        micro_batch = MicroBatch(self.stages[stage].module, splits)
        if trains:
            self._live[stage, i] = micro_batch
            self.peak = max(self.peak, len(self._live))
        with micro_batch.recording():
            output = module(*inputs)
            if stage == self.schedule.stages - 1:
                output = self._loss(i, output)
        outputs = as_tuple(output, f"what stage {stage} returned")
        micro_batch.keep(inputs if stage else (), outputs)
        if stage < self.schedule.stages - 1:
            self._check_agreed(stage, i, outputs)
            self._hand_over("F", stage, i, outputs)

    def _loss(self, i: int, output: Any) -> Any:
        """The sum of a micro-batch's loss, whose backward is the micro-batch's."""
        if self.loss_fn is None:
            self.outputs[i] = output
            return output
        total, count = checked_loss(self.loss_fn(output, self._targets.pop(i)), output)
        self._counts.append(count)
        self.total = self.total + total.detach().double()
        self.count = self.count + count
        return total

    def _check_counts(self) -> None:
        """At the end: to read a count waits for the device that has it."""
        wrong = [c for c in map(float, self._counts) if not 0 <= c < torch.inf]
        if wrong and self.failure is None:
            self.failure = ValueError(
                f"stage {self.schedule.stages - 1}: loss_fn returned a count of "
                f"{wrong[0]:g}: that of a micro-batch is a number from 0 up"
            )

    def _begin_backward(self, action: Action) -> MicroBatch:
        _, stage, i, _ = action
        last = stage == self.schedule.stages - 1
        gradients = None if last else self._ready.pop(("B", stage, i))
        return self._live[stage, i].begin_backward(gradients)

    def _end_backward(self, action: Action, micro_batch: MicroBatch) -> None:
        _, stage, i, _ = action
        del self._live[stage, i]
        gradients = micro_batch.end_backward()
        if stage > 0:
            self._hand_over("B", stage, i, gradients)

    def _hand_over(
        self, kind: str, stage: int, i: int, tensors: tuple[Tensor, ...]
    ) -> None:
        """To the stage before or after, on this rank or another."""
        other = stage + 1 if kind == "F" else stage - 1
        if self.schedule.rank_of(other, i) != self.messages.rank:
            self._outgoing[kind, stage, i] = tensors
        else:
            self._ready[kind, other, i] = received(tensors) if kind == "F" else tensors

    def _check_agreed(self, stage: int, i: int, outputs: tuple[Tensor, ...]) -> None:
        """ValueError if a stage returns something else than it did for such a batch."""
        if self.schedule.rank_of(stage + 1, i) == self.messages.rank:
            return
        check_sendable(outputs, self.messages.device)
        likes, agreed = likes_of(outputs), self.messages.agreed(stage, i)
        if agreed is not None and agreed != likes:
            raise ValueError(
                f"returned {as_words(likes)}, but {as_words(agreed)} for a batch of "
                "the same shape before: the shape of a stage's output may depend on "
                "that of its input only"
            )


def micro_batches(batch: Tensor | Sequence[Tensor] | None, count: int) -> list[Any]:
    """A batch cut along dimension 0 into `count` parts; nothing for None."""
    if batch is None:
        return []
    if isinstance(batch, Tensor):
        return list(torch.tensor_split(batch, count))
    return list(zip(*(torch.tensor_split(t, count) for t in batch), strict=True))


def checked_loss(returned: Any, output: Any) -> tuple[Tensor, Any]:
    """What loss_fn returned; ValueError if no backward can begin there."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        kind = type(returned).__name__
        raise ValueError(f"loss_fn returned {kind}, but needs to return (sum, count)")
    total, count = returned
    for name, value in (("sum", total), ("count", count)):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"loss_fn returned a {name} of shape {list(value.shape)}, but the "
                "sum and the count of a micro-batch are one number each"
            )
    if not isinstance(total, Tensor) or not isinstance(count, Tensor | int | float):
        kinds = f"({type(total).__name__}, {type(count).__name__})"
        raise ValueError(
            f"loss_fn returned {kinds}: the sum is a tensor, the count a number"
        )
    outputs = output if isinstance(output, tuple | list) else (output,)
    trains = any(getattr(tensor, "requires_grad", False) for tensor in outputs)
    trains = trains and torch.is_grad_enabled()
    if trains and not total.requires_grad and float(count) != 0:
        raise ValueError(
            "loss_fn returned a sum that is detached from the output: its gradient "
            "would be 0 everywhere"
        )
    return total, count
