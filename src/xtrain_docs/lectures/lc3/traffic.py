"""Every stage's collectives in a step, as long as what they send."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import RING
from xtrain.comm.work import Work

from ... import runs
from ...amounts import bytes_
from ...figures import REGISTRY
from ...svg import document, line, rect, text
from .common import STAGES, WIDTH, Tower, Training
from .timeline import LANES, legend

COLUMNS = {"forward": (94.0, 60), "backward": (160.0, 118), "step": (284.0, 116)}


def calls_by_phase(stage: str) -> list[list[Any]]:
    """The collectives of a step over our ring: [phase, name, bytes this rank sends]."""
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
        for _ in range(2):  # the first forward learns the order of the prefetch
            calls.clear()
            phase = "forward"
            loss = training.forward()
            phase = "backward"
            loss.backward()
            phase = "step"
            training.optimizer.step()
            training.optimizer.zero_grad()
    return calls


@REGISTRY
def step_calls(ranks: int = 4) -> str:
    """The collectives of a step by stage and phase, as long as what they send."""
    half = Tower().size * runs.ITEMSIZE * (ranks - 1) / ranks
    unit, high, top = 57 / half, 34, 44
    names = ("all-gather", "reduce-scatter", "all-reduce")
    parts = legend(dict(zip(names, names, strict=True)), (6, 124, 268))
    for phase, (x, width) in COLUMNS.items():
        parts.append(text(x, top - 6, phase, "xt-tick"))
        parts.append(line(x, top, x + width - 4, top, "xt-axis"))
    words = []
    for stage in STAGES:
        calls = runs.remembered(calls_by_phase, ranks, stage)[0]
        name = f"stage {stage}" if stage != "0" else "data parallel"
        y = top + 8 + int(stage) * high
        parts.append(text(6, y + 15, name, "xt-label"))
        at = {phase: x for phase, (x, _) in COLUMNS.items()}
        for phase, call, sent in calls:
            dy = 12 if call == "reduce-scatter" else 0
            height = 22 if call == "all-reduce" else 10
            _, _, colour, opacity, _ = LANES[call]
            hover = f"{name}, {phase}: {call}, {bytes_(sent)}"
            parts.append(rect(at[phase], y + dy, sent * unit - 1.2, height, colour,
                              opacity=opacity, radius=1.5, hover=hover))  # fmt: skip
            at[phase] += sent * unit
        total = sum(sent for *_, sent in calls) / half
        words.append(f"{name} sends {total:.2f} halves of an all-reduce")
    title = "Collectives of a step by stage"
    bottom = top + 8 + high * len(STAGES)
    return document(WIDTH, bottom, parts, title, "; ".join(words))
