"""The collectives of a step by phase, for the picture of what each stage sends."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import RING
from xtrain.comm.work import Work

from .runs_training import Training


def calls_by_phase(stage: str) -> list[list[Any]]:
    """The collectives of a step over our ring: [phase, name, bytes this rank sends].

    The second step: the first forward learns the order that the prefetch follows.
    """
    calls: list[list[Any]] = []
    phase = "forward"
    ledger = CommLedger()

    def counted(name: str, call: Callable[..., Work]) -> Callable[..., Work]:
        def collective(*tensors: Tensor, **options: Any) -> Work:
            before = ledger.bytes_sent
            work = call(*tensors, **options)
            calls.append([phase, name, ledger.bytes_sent - before])
            return work

        return collective

    spy = replace(
        RING,
        name="counted",
        all_reduce=counted("all-reduce", RING.all_reduce),
        reduce_scatter=counted("reduce-scatter", RING.reduce_scatter),
        all_gather=counted("all-gather", RING.all_gather),
    )
    training = Training(stage, spy)
    with ledger:
        for _ in range(2):
            calls.clear()
            phase = "forward"
            loss = training.forward()
            phase = "backward"
            loss.backward()
            phase = "step"
            training.optimizer.step()
            training.optimizer.zero_grad()
    return calls
