"""Real steps of every schedule: what each rank did, when, and what it held.

A row is [action, begin, end] in seconds by one clock for all ranks. Every function runs
on every rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from xtrain.bench.sleeping import SleepingLayer
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import SCHEDULES, Schedule

WIDTH, STEPS = 16, 5


def sleeping_runner(schedule: Schedule, seconds: float) -> PipelineRunner:
    """A stage's F, B and W sleep so long, divided by the chunks of a rank."""
    stages = [
        PipelineStage(
            nn.Sequential(SleepingLayer(WIDTH, seconds / schedule.chunks)),
            stage,
            schedule.stages,
        )
        for stage in schedule.stages_of(dist.get_rank())
    ]
    return PipelineRunner(stages, schedule, squares)


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.numel()


def rows(runner: PipelineRunner) -> list[list[Any]]:
    """What the last step did."""
    did = zip(runner.executed, runner.times, strict=True)
    return [[str(action), begin, end] for action, (begin, end) in did]


def fastest(runner: PipelineRunner, inputs: Tensor, targets: Tensor) -> list[list[Any]]:
    """This rank's rows of the step that took all ranks the least time; not the first,
    which negotiates shapes."""
    runner.step(inputs, targets)
    steps, spans = [], []
    for _ in range(STEPS):
        runner.step(inputs, targets)
        steps.append(rows(runner))
        ends = torch.tensor([-runner.times[0][0], runner.times[-1][1]]).double()
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        spans.append(float(ends.sum()))
    return steps[spans.index(min(spans))]


def sleeping_step_by_the_clock(
    name: str, micro_batches: int, milliseconds: float
) -> list[list[Any]]:
    """A step whose F, B and W take as long as they are told."""
    schedule = SCHEDULES[name](dist.get_world_size(), micro_batches)
    batch = torch.ones(micro_batches, WIDTH)
    return fastest(sleeping_runner(schedule, milliseconds / 1e3), batch, batch)


def decoder_step_by_the_clock(
    name: str, micro_batches: int, layers: int, width: int, sequence: int
) -> list[list[Any]]:
    """A step of a decoder that computes."""
    ranks = dist.get_world_size()
    config = XtrainConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pipeline",))
    schedule = SCHEDULES[name](ranks, micro_batches)
    stages = XtrainModel.stages(config, mesh, schedule)

    def loss_fn(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return losses, labels.numel()

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (micro_batches, sequence), generator=generator)
    return fastest(PipelineRunner(stages, schedule, loss_fn), tokens, tokens)


def activations_held(micro_batches: int) -> dict[str, float]:
    """The most micro-batches that this rank held in a step of each schedule."""
    held, batch = {}, torch.ones(micro_batches, WIDTH)
    for name, make in SCHEDULES.items():
        schedule = make(dist.get_world_size(), micro_batches)
        runner = sleeping_runner(schedule, 0.0)
        runner.step(batch, batch)
        held[name] = runner.peak_activations
    return held
