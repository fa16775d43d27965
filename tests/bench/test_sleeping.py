"""Layers that sleep: right numbers, and each part of backward at its own time."""

import time
from bisect import bisect

import pytest
import torch
from torch import nn

from xtrain.bench import Case
from xtrain.bench.races import lc5
from xtrain.bench.sleeping import SleepingLayer
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.pipeline_parallel.split_backward import split_backward
from xtrain.schedules import SCHEDULES

LAYER = "xtrain.bench.sleeping:SleepingLayer"


def reference(layers, x, grad):
    """Output and gradients of x and of the weights, by plain products."""
    x = x.clone().requires_grad_()
    weights = [layer.weight.detach().clone().requires_grad_() for layer in layers]
    y = x
    for weight in weights:
        y = y * weight
    y.backward(grad)
    return y, x.grad, [weight.grad for weight in weights]


@pytest.mark.verifies(LAYER)
@pytest.mark.parametrize("split", [False, True])
def test_sleeping_layers_have_the_gradients_of_a_product(split):
    pauses = []
    layers = nn.Sequential(*(SleepingLayer(5, 0.5, pauses.append) for _ in range(3)))
    given, grad = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    y, dx, dws = reference(layers, given, grad)
    x = given.clone().requires_grad_()
    with split_backward() as parts:
        output = layers(x)
    assert pauses == [0.5] * 3
    if split:
        parts.backward_input(output, grad)
        assert len(pauses) == 6
        assert all(layer.weight.grad is None for layer in layers)
        parts.backward_weight()
    else:
        parts.backward(output, grad)
    assert len(pauses) == 9
    torch.testing.assert_close(output, y)
    torch.testing.assert_close(x.grad, dx)
    for layer, dw in zip(layers, dws, strict=True):
        torch.testing.assert_close(layer.weight.grad, dw)


@pytest.mark.verifies(LAYER)
def test_an_input_without_gradient_still_takes_the_time_of_one():
    pauses = []
    layer = SleepingLayer(5, 0.5, pauses.append)
    output = layer(torch.ones(2, 5))
    output.sum().backward()
    assert len(pauses) == 3
    torch.testing.assert_close(layer.weight.grad, torch.full((5,), 2.0))
    with torch.no_grad():
        layer(torch.ones(2, 5))
    assert len(pauses) == 4


def pauses_of_actions(name, ranks, micro_batches):
    """How often a layer pauses in each action of this rank, two layers a stage."""
    schedule, at = SCHEDULES[name](ranks, micro_batches), []
    stages = [
        PipelineStage(
            nn.Sequential(
                *(
                    SleepingLayer(4, 0.0, lambda _: at.append(time.perf_counter()))
                    for _ in range(2)
                )
            ),
            stage,
            schedule.stages,
        )
        for stage in schedule.stages_of(torch.distributed.get_rank())
    ]
    runner = PipelineRunner(stages, schedule, lambda y, t: ((y - t).sum(), t.numel()))
    batch = torch.ones(micro_batches, 4)
    runner.step(batch, batch)
    counts = {}
    for action, (begin, end) in zip(runner.executed, runner.times, strict=True):
        counts[str(action)] = bisect(at, end) - bisect(at, begin)
    assert sum(counts.values()) == len(at)
    return counts


@pytest.mark.verifies(LAYER, "xtrain.pipeline_parallel.runner:PipelineRunner")
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_v", "dualpipe"])
def test_stages_sleep_in_f_b_and_w_as_the_schedule_says(world, name):
    schedule = SCHEDULES[name](2, 4)
    kinds = {"F": 2, "B": 2, "W": 2, "BW": 4}
    ran = world(2).run(pauses_of_actions, name, 2, 4)
    for counts, actions in zip(ran, schedule.actions, strict=True):
        expected = {str(a): sum(kinds[p.kind] for p in a.parts) for a in actions}
        assert {a: n for a, n in counts.items() if n} == expected


def test_the_goals_of_sleeping_stages_are_the_simulated_shares():
    race = lc5.sleeping()
    assert lc5.share_of_ideal("gpipe", 4) == pytest.approx(8 / (8 + 3))
    assert lc5.share_of_ideal("interleaved", 4) == pytest.approx(8 / (8 + 3 / 2))
    for ranks, near in ((4, 1.05), (8, 1.10)):
        case = Case(lc5.SLEEP, ranks)
        for name in SCHEDULES:
            ideal = lc5.share_of_ideal(name, ranks)
            assert race.goal(name, case) == pytest.approx(ideal / near)
    assert lc5.part_seconds(Case(lc5.SLEEP, 4)) == 0.05
