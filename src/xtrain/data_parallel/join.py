"""Uneven inputs: a rank that has run out of batches keeps the others company.

    rank 0   step 0 | step 1 | step 2 | step 3 | sync
    rank 1   step 0 | step 1 | shadow | shadow | sync      had two batches only

Every step is a row of collectives, and one rank that stays away leaves all others
waiting for ever. So each synchronised forward (or `reduce_gradients`) first asks which
ranks still have inputs. A rank whose inputs are over takes part with gradients of zero
until no rank has any.

Between such a forward and its backward comes no other: a rank without inputs answers
each with the messages of one backward.

At the end the weights of a rank that stayed longest are copied to all. Its optimizer's
state is not: to train on, give all ranks equally many batches instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm.checks import message_device
from xtrain.comm.uneven import uneven_calls


@contextmanager
def join(model: Any, divide_by_initial_world_size: bool = True) -> Iterator[None]:
    """Train inside; leave the block when this rank's inputs are over.

    Args:
        model: a `DistributedDataParallel`.
        divide_by_initial_world_size: average over all ranks, so that every sample of
            the last steps weighs what the earlier ones did; otherwise over those that
            are still there. It does nothing to gradients that are summed.

    Costs one all-reduce of N numbers a step.
    """
    state = JoinState(model, divide_by_initial_world_size)
    model._join_state = state
    try:
        with uneven_calls(model.process_group):
            yield
        while state.count_active_ranks(active=False):
            model._shadow(state.source_rank)
        model._copy_from(state.source_rank)
    finally:
        model._join_state = None
        model._set_active_ranks(model._size, model._size)


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
                "ranks whose inputs are over answer every forward with one backward; "
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
