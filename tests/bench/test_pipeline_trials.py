"""Pipelines as trials: a wrong loss or gradient is seen."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from xtrain.bench import Case
from xtrain.bench.pipeline_trials import our_step, pipeline_trial, torch_step
from xtrain.bench.races import lc5
from xtrain.bench.training_trials import TOLERANCE

SIZE = 4096
TRIAL = "xtrain.bench.pipeline_trials:pipeline_trial"


def loss_of_another_count(schedule, stages, sum_loss):
    """Divides the loss by another count than the gradients."""
    step = our_step(schedule, stages, sum_loss)
    return lambda inputs, targets: step(inputs, targets) * 2


def last_gradient_lost(schedule, stages, sum_loss):
    """One rank forgets a gradient."""
    step = our_step(schedule, stages, sum_loss)

    def wrong(inputs, targets):
        loss = step(inputs, targets)
        if dist.get_rank() == 1:
            next(iter(stages[0].parameters())).grad.zero_()
        return loss

    return wrong


def errors_of(make_step):
    """How far each output is from that of one process, after all checked steps."""
    race = lc5.race("one_f_one_b", "small")
    model, schedule, _ = race.contestants[1].make.args
    case = Case(SIZE, dist.get_world_size())
    trial = pipeline_trial(model, schedule, make_step, case)
    for _ in range(race.checked_calls):
        trial.call()
    right = race.reference(case)
    outputs = zip(trial.outputs, right, strict=True)
    return [(output - wanted).abs().max().item() for output, wanted in outputs]


@pytest.mark.verifies(TRIAL)
def test_a_pipeline_with_a_wrong_loss_or_gradient_is_seen_on_every_rank(world):
    for make_step, wrong in (
        (our_step, []),
        (partial(torch_step, lc5.LIKE["one_f_one_b"][0]), []),
        (loss_of_another_count, [0]),
        (last_gradient_lost, [1]),
    ):
        for errors in world(2).run(errors_of, make_step):
            found = [i for i, error in enumerate(errors) if error > TOLERANCE]
            assert found == wrong, (make_step, errors)


def bytes_of_stages(kind, who):
    """Parameters that this rank's stages hold, and those of the whole model."""
    model = lc5.decoder(lc5.SHAPES["small"], Case(SIZE, dist.get_world_size()))
    with torch.device("meta"):
        whole = sum(p.numel() for p in model.whole().parameters())
    schedule = lc5.made(lc5.LIKE[kind][who], 8, dist.get_world_size())
    stages = model.cut(schedule)
    return sum(p.numel() for s in stages for p in s.parameters()), whole


@pytest.mark.parametrize("kind", lc5.LIKE)
def test_both_sides_are_cut_into_stages_that_make_up_the_model(world, kind):
    for who in (1, 2):
        held = world(2).run(bytes_of_stages, kind, who)
        assert sum(numel for numel, _ in held) == held[0][1]
        assert min(numel for numel, _ in held) > 0
