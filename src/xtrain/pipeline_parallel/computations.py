"""What one rank computes in a step: the forwards and backwards of its stages.

    stage 0          stage 1          stage 2 (last)
    F0 -> outputs -> F0 -> outputs -> F0 -> loss_fn -> sum, count
    BW0 <-- gradients -- BW0 <-- gradients -- BW0

What one stage gives to the next is in `ready` if that is on the same rank, and in
`outgoing`, for its SEND, if it is not. Both are indexed by ("F" or "B", stage,
micro-batch).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from xtrain.comm.batch_rows import in_micro_batch
from xtrain.pipeline_parallel.loss import StepLoss
from xtrain.pipeline_parallel.message_header import as_words, check_sendable, metas_of
from xtrain.pipeline_parallel.messages import Messages
from xtrain.pipeline_parallel.micro_batch import MicroBatch, as_tuple, received
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.pipeline_parallel.torch_wrappers import TorchFSDP
from xtrain.schedules import Action
from xtrain.schedules.action import OverlapsBackward, RunsInPieces

Tensors = tuple[Tensor, ...]


def runs_whole(stage: PipelineStage) -> bool:
    """Whether its module must be called: hooks of `fully_shard` gather weights then."""
    return stage.recompute or isinstance(stage.reduction, TorchFSDP)


class Computations:
    """Runs this rank's stages, and keeps what is between forward and backward.

    `inputs` are those of the micro-batches that begin on this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        messages: Messages,
        loss: StepLoss,
        inputs: Mapping[int, Any],
    ):
        self.stages, self.messages, self.loss = stages, messages, loss
        self.schedule = messages.schedule
        self._splits = {
            (action.stage, action.micro_batch)
            for action in self.schedule.actions[messages.rank]
            if action.kind == "W"
        }
        self.ready: dict[tuple[str, int, int], Tensors] = {
            ("F", 0, i): as_tuple(rows, "the input") for i, rows in inputs.items()
        }
        self.outgoing: dict[tuple[str, int, int], Tensors] = {}
        self._live: dict[tuple[int, int], MicroBatch] = {}  # until their B or BW
        self._waiting: dict[tuple[int, int], MicroBatch] = {}  # for their W
        self.peak = 0

    def run(self, action: Action) -> None:
        """Do an action of kind F, B, W or BW, or an overlapped pair."""
        key = action.stage, action.micro_batch
        if action.under is not None:
            self._pair(action, action.under)
        elif action.kind == "F":
            self._forward(action, self._alone(action))
        elif action.kind == "W":
            self._waiting.pop(key).backward_weight()
        else:
            micro_batch = self._begin_backward(action)
            if action.kind == "B":
                micro_batch.backward_input()
                self._waiting[key] = micro_batch
            else:
                micro_batch()
            self._end_backward(action, micro_batch)

    def _pair(self, action: Action, under: Action) -> None:
        """A forward and a backward; its module runs one into the other if it can.

        A stage that computes its forward again is run as a whole.
        """
        backward = self._begin_backward(under)
        stage = self.stages[action.stage]
        module = stage.module
        if isinstance(module, OverlapsBackward) and not runs_whole(stage):
            overlapped = module.forward_with_backward
            self._forward(action, lambda *inputs: overlapped(inputs, backward))
        else:
            self._forward(action, stage)
            backward()
        self._end_backward(under, backward)

    def _alone(self, action: Action) -> Callable[..., Any]:
        """What runs a forward that is in no pair, if its backward may be in one."""
        stage, key = self.stages[action.stage], (action.stage, action.micro_batch)
        whole = runs_whole(stage) or key in self._splits or not torch.is_grad_enabled()
        if isinstance(stage.module, RunsInPieces) and not whole:
            return stage.module.forward_in_pieces
        return stage

    def _forward(self, action: Action, module: Callable[..., Any]) -> None:
        _, stage, i, _ = action
        inputs = self.ready.pop(("F", stage, i))
        trains = torch.is_grad_enabled()
        splits = trains and (stage, i) in self._splits
        micro_batch = MicroBatch(self.stages[stage].module, splits)
        if trains:
            self._live[stage, i] = micro_batch
            self.peak = max(self.peak, len(self._live))
        last = stage == self.schedule.stages - 1
        with micro_batch.recording(), in_micro_batch(i):
            output = module(*inputs)
            if last:
                output = self.loss.add(i, output)
        outputs = as_tuple(output, f"what stage {stage} returned")
        micro_batch.keep(inputs if stage else (), outputs)
        if not last:
            self._check_agreed(stage, i, outputs)
            self._give("F", stage, i, outputs)

    def _begin_backward(self, action: Action) -> MicroBatch:
        _, stage, i, _ = action
        last = stage == self.schedule.stages - 1
        gradients = None if last else self.ready.pop(("B", stage, i))
        return self._live[stage, i].begin_backward(gradients)

    def _end_backward(self, action: Action, micro_batch: MicroBatch) -> None:
        _, stage, i, _ = action
        del self._live[stage, i]
        gradients = micro_batch.end_backward()
        if stage > 0:
            self._give("B", stage, i, gradients)

    def _give(self, kind: str, stage: int, i: int, tensors: Tensors) -> None:
        """To the stage before or after, on this rank or another."""
        other = stage + 1 if kind == "F" else stage - 1
        if self.schedule.rank_of(other, i) != self.messages.rank:
            self.outgoing[kind, stage, i] = tensors
        else:
            self.ready[kind, other, i] = received(tensors) if kind == "F" else tensors

    def _check_agreed(self, stage: int, i: int, outputs: Tensors) -> None:
        """ValueError if a stage returns something else than it did for such a batch."""
        if self.schedule.rank_of(stage + 1, i) == self.messages.rank:
            return
        check_sendable(outputs, self.messages.device)
        metas, agreed = metas_of(outputs), self.messages.agreed(stage, i)
        if agreed is not None and agreed != metas:
            raise ValueError(
                f"returned {as_words(metas)}, but {as_words(agreed)} for a batch of "
                "the same shape before: the shape of a stage's output may depend on "
                "that of its input only"
            )
