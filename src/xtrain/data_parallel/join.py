"""Uneven inputs: a rank that has run out of batches sends zeros until all have.

    rank 0   step 0 | step 1 | step 2 | step 3 | sync
    rank 1   step 0 | step 1 | shadow | shadow | sync      had two batches only

Every step is a sequence of collectives, and all ranks must call all of them. So each
synchronised forward (or `reduce_gradients`) first asks which ranks still have inputs. A
rank that has run out of inputs takes part with gradients of zero until all have.

Such a forward must be followed by its own backward: a rank without inputs answers each
with the messages of one backward.

At the end the weights of a rank that had the most batches are copied to all, without
its optimizer's state: to train on, give all ranks equally many batches instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm.checks import message_device
from xtrain.comm.uneven import uneven_calls
from xtrain.data_parallel.replicas import broadcast_all


@contextmanager
def join(model: Any, divide_by_initial_world_size: bool = True) -> Iterator[None]:
    """Train inside; leave the block when this rank has run out of inputs.

    Args:
        model: a `DistributedDataParallel`.
        divide_by_initial_world_size: average over all ranks, so that every sample of
            the last steps weighs what the earlier ones did; otherwise over those that
            still have inputs. Gradients that are summed stay sums.

    Costs one all-reduce of N numbers a step.
    """
    state = JoinState(model, divide_by_initial_world_size)
    model._join_state = state
    try:
        with uneven_calls(model.process_group):
            yield
        while state.count_active_ranks(active=False):
            shadow_step(model, state.source_rank)
        tensors = [*model.module.parameters(), *model.module.buffers()]
        broadcast_all(tensors, model.process_group, state.source_rank)
    finally:
        model._join_state = None
        model._set_active_ranks(model._size, model._size)


def shadow_step(model: Any, source_rank: int) -> None:
    """Take part in a step of the others, with gradients of zero."""
    model._synchronise_buffers(source_rank)
    for bucket in model._reducer.buckets:
        bucket.flat.zero_()
        bucket.waiting.clear()
    model._finish([], shadow=True)
    model.zero_grad()  # these are the gradients of the others' batches
    model._reduced.clear()


class JoinState:
    """Which ranks still have inputs, asked once a step by every rank."""

    def __init__(self, model: Any, by_initial_size: bool):
        self._model, self._by_initial_size = model, by_initial_size
        self.source_rank = 0  # the first rank that has inputs, or was the last to
        self.in_step = False  # a forward was announced, its gradients are to come

    def begin_step(self) -> None:
        """Tell the others that the messages of a backward will follow."""
        if self.in_step:
            raise ValueError(
                "a second forward before the backward of the first, inside join(): "
                "ranks without inputs answer every forward with one backward; "
                "run forwards ahead in no_sync(), then reduce_gradients()"
            )
        self.count_active_ranks(active=True)
        self.in_step = True

    def count_active_ranks(self, active: bool) -> int:
        """How many ranks have inputs; this one tells the others whether it has."""
        group = self._model.process_group
        there = torch.zeros(self._model._size, device=message_device(group))
        there[self._model._rank] = float(active)
        dist.all_reduce(there, group=group)
        ranks = there.nonzero().flatten().tolist()
        if ranks:
            self.source_rank = ranks[0]
            divisor = self._model._size if self._by_initial_size else len(ranks)
            self._model._set_active_ranks(len(ranks), divisor)
        return len(ranks)
