"""A pipeline where all messages of a group share one queue, as after `device_id=`."""

import os

import pytest
import torch.distributed as dist

from tests.pipeline_parallel.pipelines import batch, layers, make, own, squares
from xtrain.backends.nccl_rules.group import EAGER
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.pipeline_parallel.communicators import lanes_of, pairs_of
from xtrain.testing import World

NAMES = ("one_f_one_b", "interleaved", "zb_v", "dualpipe")


def losses(name: str, in_one_lane: bool = False) -> list[float]:
    """Of two steps on nccl-rules, in groups whose messages share a queue."""
    if dist.get_backend() == "nccl-rules":
        assert os.environ[EAGER] == "1"
    ranks = dist.get_world_size()
    schedule = make(name, ranks, 2 * ranks)
    stages = own(layers(schedule.stages), schedule, dist.get_rank())
    runner = PipelineRunner(stages, schedule, squares)
    if in_one_lane:
        runner._messages._lanes = {}
    return [runner.step(*batch(4 * ranks)).item() for _ in range(2)]


@pytest.fixture
def one_queue(monkeypatch):
    """Ranks that begin while this is set have one queue a group."""
    monkeypatch.setenv(EAGER, "1")


@pytest.mark.verifies("xtrain.pipeline_parallel.communicators:lane_groups")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_pipeline_runs_where_a_group_has_one_queue(one_queue, ranks):
    with World(ranks, "nccl-rules") as bound, World(ranks) as plain:
        for name in NAMES:
            if name == "dualpipe" and ranks == 3:
                continue
            assert bound.run(losses, name) == plain.run(losses, name)


def test_without_groups_of_its_own_it_would_wait_for_ever(one_queue):
    with World(4, "nccl-rules") as bound, pytest.raises(RuntimeError, match="queue"):
        bound.run(losses, "one_f_one_b", True)


def test_lanes_of_chains_and_of_rings():
    for ranks, wanted in ((2, 2), (3, 4), (4, 4), (8, 4)):
        lanes = lanes_of(pairs_of(make("one_f_one_b", ranks, 8)))
        assert len({*lanes.values()}) == wanted
    for ranks, wanted in ((3, 6), (4, 4), (8, 4)):
        lanes = lanes_of(pairs_of(make("interleaved", ranks, 2 * ranks)))
        assert len({*lanes.values()}) == wanted
