"""Lecture 5: our pipeline runner against torch's schedules.

    torch   torch.distributed.pipelining, one schedule after the other
    ours    PipelineRunner on our schedule of that name

Both run the same stages of an `XtrainModel` on the same ranks, with torch's fused
AdamW; losses and gradients must be those of one process. torch's zero bubble has two
stages on a rank, and ours is ZB-H1 with one: that race alone compares different
schedules. torch's ScheduleLoopedBFS has no counterpart here.

`size` is that of all weights in bytes. In the race of sleeping stages it is what F, B
and W of a rank's part take together for one micro-batch, in microseconds.
"""

import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from xtrain.bench.pipeline_trials import (
    Model,
    in_one_process,
    our_step,
    pipeline_trial,
    torch_step,
)
from xtrain.bench.race import Case, Contestant, Goal, Race, Trial
from xtrain.bench.sleeping import SleepingLayer
from xtrain.bench.training_trials import (
    CHECKED,
    HEADS,
    OPTIONS,
    TOLERANCE,
    Shape,
    batch_of,
    config_for,
    group_on,
)
from xtrain.model import XtrainModel
from xtrain.pipeline_parallel import PipelineStage
from xtrain.schedules import SCHEDULES, Schedule, simulate

TITLE = "Lecture 5: our pipeline runner against torch.distributed.pipelining"

MiB = 2**20
SHAPES = {"batch8": Shape(8, 8, 256, HEADS), "small": Shape(8, 8, 64, HEADS)}
SIZES = {"batch8": 27 * MiB, "small": 2 * MiB}

LIKE = {  # a race: torch's schedule, that of ours with its stages, and ours
    "gpipe": (pipelining.ScheduleGPipe, "gpipe", "gpipe"),
    "one_f_one_b": (pipelining.Schedule1F1B, "one_f_one_b", "one_f_one_b"),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, "interleaved", "interleaved"),
    "zero_bubble": (pipelining.ScheduleInterleavedZeroBubble, "interleaved", "zb_h1"),
    "zb_v": (pipelining.ScheduleZBVZeroBubble, "zb_v", "zb_v"),
    "dualpipe_v": (pipelining.ScheduleDualPipeV, "dualpipe_v", "dualpipe_v"),
}
LEAST = {"gpipe": 1.0, "one_f_one_b": 1.0}  # times as fast as torch's; else OTHERS
OTHERS = 0.98


def made(name: str, micro_batches: int | None, ranks: int) -> Schedule:
    """A schedule by name; twice as many micro-batches as ranks unless given."""
    return SCHEDULES[name](ranks, micro_batches or 2 * ranks)


# ------------------------------------------------------------------- a decoder


def decoder(shape: Shape, case: Case) -> Model:
    """The decoder whose weights take about `case.size` bytes."""
    config = config_for(case.size, shape.layers, shape.kv_heads)
    tokens, labels = batch_of(shape, 0).to(case.device)

    def cut(schedule: Schedule) -> list[PipelineStage]:
        group = group_on("gloo")
        mesh = DeviceMesh.from_group(group, case.device, mesh_dim_names=("pipeline",))
        return XtrainModel.stages(config, mesh, schedule, device=case.device)

    return Model(
        partial(XtrainModel, config),
        cut,
        tokens,
        labels,
        sum_of_tokens,
        partial(torch.optim.AdamW, **OPTIONS),
        CHECKED,
    )


def sum_of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def race(kind: str, step: str) -> Race:
    """torch's schedule and ours, of one step."""
    theirs, places, ours = LIKE[kind]
    model, size, m = partial(decoder, SHAPES[step]), SIZES[step], SHAPES[step].batch
    name = "ours" if places == ours else f"ours, {ours}"
    least = LEAST.get(kind, OTHERS)
    return Race(
        f"{step}_{kind}",
        f"A step, {step}, {kind}",
        (
            Contestant(
                "torch",
                partial(pipeline_trial, model, partial(made, places, m),
                        partial(torch_step, theirs)),
            ),
            Contestant(
                name, partial(pipeline_trial, model, partial(made, ours, m), our_step)
            ),
        ),
        sizes=(size,),
        reference=partial(in_one_process, model),
        tolerance=TOLERANCE,
        checked_calls=CHECKED,
        memory=(step, kind) == ("batch8", "one_f_one_b"),
        goals=tuple(Goal(name, least, size, ranks) for ranks in (2, 4)),
    )  # fmt: skip


# ------------------------------------------------------------- stages that sleep

SLEEP = 150_000  # F, B and W of a rank's part: 50 ms each
WIDTH = 64


def torch_name(kind: type) -> str:
    """What a contestant with torch's schedule is called."""
    return f"torch {kind.__name__.removeprefix('Schedule')}"


def sleepers(case: Case) -> Model:
    """Two layers for each rank, which sleep F, B and W of half of its part."""
    count = 2 * case.ranks
    inputs = torch.linspace(-1, 1, count * WIDTH).reshape(count, WIDTH)

    def layers(seconds: float) -> nn.Sequential:
        return nn.Sequential(*(SleepingLayer(WIDTH, seconds) for _ in range(count)))

    def cut(schedule: Schedule) -> list[PipelineStage]:
        whole, stages = layers(part_seconds(case) / 2), []
        for stage in schedule.stages_of(torch.distributed.get_rank()):
            each = count // schedule.stages
            held = nn.Sequential()
            for index in range(stage * each, (stage + 1) * each):
                held.add_module(str(index), whole[index])
            stages.append(PipelineStage(held, stage, schedule.stages))
        return stages

    return Model(
        partial(layers, 0.0), cut, inputs, inputs.flip(0), sum_of_squares, None, 1
    )


def part_seconds(case: Case) -> float:
    """Of F, of B and of W, of a rank's part of the model and one micro-batch."""
    return case.size / 3e6


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    """The loss of all elements."""
    return (output - target).square().sum()


def without_bubble(case: Case) -> Trial:
    """Sleeps as long as each rank works; its numbers are computed before."""
    seconds = 3 * part_seconds(case) * 2 * case.ranks
    return Trial(partial(time.sleep, seconds), in_one_process(sleepers, case))


def share_of_ideal(name: str, ranks: int) -> float:
    """Work over the time of the step, as simulated."""
    schedule = made(name, None, ranks)
    part = 1 / schedule.chunks
    return 3 * schedule.micro_batches / simulate(schedule, part, part, part).makespan


def sleeping() -> Race:
    """Every schedule of ours and those of torch, against a step without a bubble."""
    ours = [
        Contestant(
            name, partial(pipeline_trial, sleepers, partial(made, name, None), our_step)
        )
        for name in SCHEDULES
    ]
    theirs = [
        Contestant(
            torch_name(kind),
            partial(pipeline_trial, sleepers, partial(made, places, None),
                    partial(torch_step, kind)),
            ranks=(4,),
        )
        for kind, places, _ in LIKE.values()
    ]  # fmt: skip
    return Race(
        "sleeping",
        "Stages that sleep",
        (Contestant("no bubble", without_bubble), *ours, *theirs),
        sizes=(SLEEP,),
        ranks=(4, 8),
        reference=partial(in_one_process, sleepers),
        tolerance=TOLERANCE,
        rounds=5,
        goals=tuple(
            Goal(name, near * share_of_ideal(name, ranks), SLEEP, ranks)
            for name in SCHEDULES
            for ranks, near in ((4, 1 / 1.05), (8, 1 / 1.10))
        ),
    )


RACES = [*(race(kind, step) for step in SHAPES for kind in LIKE), sleeping()]
