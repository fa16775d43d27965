"""Steps of the trainer as trials: three independent programs train alike."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.bench.test_races import ONCE
from xtrain.bench import RaceError, plain_loop
from xtrain.bench.races import lc8
from xtrain.bench.runner import run_measurement
from xtrain.bench.trainer_trials import VOCABULARY, Workload

TINY = Workload(width=32, layers=2, sequence=16)
RACES = lc8.races_of("tiny", TINY)


@pytest.mark.verifies("xtrain.bench.trainer_trials:trainer")
@pytest.mark.parametrize("race", RACES, ids=lambda race: race.name)
def test_all_sides_have_the_losses_of_the_first_steps(world, xtrain_worlds, race):
    if xtrain_worlds.backend == "nccl-rules":
        pytest.skip("torch's DTensor and the plain loop are written for gloo")
    (ranks,) = race.ranks
    found = run_measurement(world(ranks), race, TINY.size, ONCE)
    assert [result.kept for result in found.results] == [1, 1]


class OneRankAlone(plain_loop.Buckets):
    """Forgets to sum over the data ranks."""

    def ready(self, number, parameter):
        self.active = False
        super().ready(number, parameter)


def broken(layout, case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_loop, "Buckets", OneRankAlone)
        return plain_loop.plain_loop(TINY, layout, case)


def test_who_trains_wrongly_is_not_timed(world):
    race = next(r for r in RACES if r.name == "data_tensor_tiny")
    wrong = partial(broken, lc8.LAYOUTS["data_tensor"])
    loop, ours = race.contestants
    race = replace(race, contestants=(ours, replace(loop, make=wrong)), goals=())
    with pytest.raises(RaceError, match="plain loop.*output 0 differs"):
        run_measurement(world(4), race, TINY.size, ONCE)


def test_the_workloads_are_those_of_the_page():
    large, small = lc8.WORKLOADS.values()
    assert (large.width, large.sequence) == (256, 256)
    assert (small.width, small.sequence) == (128, 64)
    assert (VOCABULARY, large.layers, large.batch) == (4096, 4, 4)
    for work in lc8.WORKLOADS.values():
        assert 0.2 < VOCABULARY * work.width * 4 / work.size < 1 / 3
        tokens, labels = work.batch_of(0)
        assert tokens.shape == labels.shape == (work.batch, work.sequence)
        assert not torch.equal(tokens, work.batch_of(1)[0])
