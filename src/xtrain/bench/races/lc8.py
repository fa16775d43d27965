"""Lecture 8: steps of the whole trainer.

    one process    transformers' Llama and torch's AdamW
    four ranks     the same under torch's FSDP2 and DTensor, on data x tensor ranks
    plain loop     the steps of a small teaching trainer, written in plain torch

A step has forward, backward, clipping and AdamW; against the plain loop nothing is
clipped. `size` is that of all weights in bytes.
"""

from collections.abc import Callable, Mapping
from functools import partial

from xtrain.bench.plain_loop import plain_loop
from xtrain.bench.race import Case, Contestant, Goal, Race, Trial
from xtrain.bench.trainer_trials import (
    LARGE,
    SMALL,
    Workload,
    trainer,
    transformers_alone,
    transformers_on_ranks,
)
from xtrain.bench.training_trials import CHECKED, TOLERANCE
from xtrain.plan import Layout

TITLE = "Lecture 8: the trainer against transformers on FSDP2, and a plain loop"

OURS = "xtrain"
SHARDED = Layout(data=2, tensor=2, zero=3)
LAYOUTS = {
    "data_tensor": Layout(data=2, tensor=2, micro_batches=2),
    "pipeline_tensor": Layout(pipeline=2, tensor=2, micro_batches=4),
    "pipeline_data": Layout(pipeline=2, data=2, micro_batches=4),
}
WORKLOADS: dict[str, Workload] = {"large": LARGE, "small": SMALL}


def race(
    name: str,
    title: str,
    work: Workload,
    sides: Mapping[str, Callable[[Case], Trial]],
    least: float,
) -> Race:
    """The first side is the baseline, and ours is to reach `least`."""
    ranks = 1 if name.startswith("one_process") else 4
    return Race(
        name,
        title,
        tuple(Contestant(who, make) for who, make in sides.items()),
        sizes=(work.size,),
        ranks=(ranks,),
        tolerance=TOLERANCE,
        checked_calls=CHECKED,
        goals=(Goal(OURS, least, work.size, ranks),),
    )


def races_of(kind: str, work: Workload) -> list[Race]:
    """All races of one workload."""
    alone = {
        "transformers": partial(transformers_alone, work),
        OURS: partial(trainer, work, Layout()),
    }
    sharded = {
        "transformers, FSDP2 and DTensor": partial(
            transformers_on_ranks, work, SHARDED
        ),
        OURS: partial(trainer, work, SHARDED),
    }
    found = [
        race(f"one_process_{kind}", "One process", work, alone, 1.05),
        race(f"four_ranks_{kind}", "Four ranks", work, sharded, 1.0),
    ]
    for name, layout in LAYOUTS.items():
        sides = {
            "plain loop": partial(plain_loop, work, layout),
            OURS: partial(trainer, work, layout, max_norm=None),
        }
        title = name.replace("_", " x ").capitalize()
        found.append(race(f"{name}_{kind}", title, work, sides, 1.2))
    return found


RACES = [one for kind, work in WORKLOADS.items() for one in races_of(kind, work)]
