"""Every schedule in real ranks, against one process in float64."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.model.twins import batch as tokens_and_labels
from tests.model.twins import config_of
from tests.pipeline_parallel.pipelines import make, train, train_all
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import Action, Schedule, simulate, validate

SIZES = {
    1: [("gpipe", 3), ("one_f_one_b", 2), ("zb_h1", 2), ("zb_v", 2)],
    2: [("gpipe", 1), ("one_f_one_b", 5), ("interleaved", 4), ("interleaved", 5),
        ("zb_h1", 3), ("zb_h2", 4), ("zb_v", 5), ("chimera", 2),
        ("dualpipe_simple", 4), ("dualpipe", 4), ("dualpipe", 10), ("dualpipe_v", 5)],
    3: [("gpipe", 5), ("one_f_one_b", 2), ("interleaved", 2), ("interleaved", 8),
        ("zb_h1", 4), ("zb_h2", 7), ("zb_v", 6)],
    4: [("gpipe", 4), ("one_f_one_b", 8), ("interleaved", 8), ("interleaved", 10),
        ("interleaved", 3), ("zb_h1", 8), ("zb_h2", 5), ("zb_v", 8), ("chimera", 4),
        ("dualpipe_simple", 8), ("dualpipe", 10), ("dualpipe_v", 8)],
    8: [("gpipe", 3), ("one_f_one_b", 9), ("interleaved", 11), ("zb_h1", 4),
        ("zb_h2", 4), ("zb_v", 4), ("chimera", 8), ("dualpipe_simple", 16),
        ("dualpipe", 16), ("dualpipe_v", 16)],
}  # fmt: skip


def check(schedule: Schedule, results: list[dict]) -> None:
    """Loss, gradients, order and memory of each rank."""
    peaks = simulate(schedule).peak_activations
    for rank, result in enumerate(results):
        at = f"{schedule.name}, {schedule.micro_batches} micro-batches, rank {rank}"
        assert max(result["losses"]) < 1e-11, at
        assert result["gradients"] < 1e-11, at
        assert result["evaluated"] < 1e-11, at
        assert result["order"], at
        assert result["peak"] == peaks[rank], at
        assert result["held"] == peaks[rank], at
        assert result["left"] == 0, at


@pytest.mark.verifies(
    "xtrain.pipeline_parallel.runner:PipelineRunner",
    "xtrain.pipeline_parallel.executor:Executor",
    "xtrain.pipeline_parallel.computations:Computations",
    "xtrain.pipeline_parallel.micro_batch:received",
    "xtrain.pipeline_parallel.messages:Messages",
)
@pytest.mark.parametrize("ranks", SIZES)
def test_every_schedule_trains_as_one_process_in_its_order_and_memory(world, ranks):
    """The memory is counted by autograd's hooks, not by the runner."""
    results = world(ranks).run(train_all, SIZES[ranks])
    for case, (name, micro_batches) in enumerate(SIZES[ranks]):
        check(make(name, ranks, micro_batches), [result[case] for result in results])


# ----------------------------------------------------- any order that can be run at all


@st.composite
def schedules(draw) -> Schedule:
    """What is ready is done in any order, on the rank that holds the stage."""
    placement = draw(st.sampled_from(["loop", "v", "mirror"]))
    mirrored = placement == "mirror"
    ranks = draw(st.sampled_from([2, 4] if mirrored else [2, 3, 4]))
    chunks = 1 if mirrored else draw(st.integers(1, 2))
    m = draw(st.integers(1, 3)) * (1 + mirrored)
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    drawn = Schedule("drawn", ranks, m, chunks, placement, tuple(orders))
    last = drawn.stages - 1
    ready = [Action("F", 0, i) for i in range(m)]
    while ready:
        kind, stage, i, _ = action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        whole = kind == "B" and draw(st.booleans())
        orders[drawn.rank_of(stage, i)].append(
            Action("BW", stage, i) if whole else action
        )
        if kind == "F":
            following = Action("F", stage + 1, i)
            ready.append(following if stage < last else Action("B", last, i))
        elif kind == "B":
            ready += [Action("B", stage - 1, i)] * (stage > 0)
            ready += [Action("W", stage, i)] * (not whole)
    return replace(drawn, actions=tuple(map(with_pairs, orders)))


def with_pairs(order: list[Action]) -> list[Action]:
    """A forward and the full backward before it, as one pair."""
    paired: list[Action] = []
    for action in order:
        if action.kind == "F" and paired and paired[-1].kind == "BW":
            paired[-1] = action._replace(under=paired[-1])
        else:
            paired.append(action)
    return paired


def can_be_run(schedule: Schedule) -> bool:
    """A pair's forward may wait for others that wait for the pair's backward."""
    try:
        validate(schedule)
    except ValueError:
        return False
    return True


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedule=schedules())
def test_any_order_that_can_be_run_is_run(world, schedule):
    assume(can_be_run(schedule))
    rows = [2 * schedule.micro_batches + 1] * 2
    check(schedule, world(schedule.ranks).run(train, schedule, rows))


# --------------------------------------------------------------------- the whole model


def train_model(name: str, tied: bool) -> tuple[list[float], list[float]]:
    """Losses of the runner, and of the whole model in one process."""
    ranks = dist.get_world_size()
    schedule = make(name, ranks, 2 * ranks)
    config = config_of(num_hidden_layers=2 * ranks, tie_word_embeddings=tied)
    mesh = init_mesh((ranks,), ("pipeline",))
    stages = XtrainModel.stages(config, mesh, schedule, dtype=torch.float64)
    whole = XtrainModel(config, dtype=torch.float64)
    runner = PipelineRunner(stages, schedule, whole_loss, mesh["pipeline"].get_group())
    ours = torch.optim.SGD(runner.parameters, lr=0.3)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.3)
    found, wanted = [], []
    for step in range(3):
        tokens, labels = tokens_and_labels(step, rows=2 * ranks)
        ours.zero_grad()
        theirs.zero_grad()
        found.append(runner.step(tokens, labels).item())
        loss = whole(tokens, labels)
        loss.backward()
        wanted.append(loss.item())
        ours.step()
        theirs.step()
    return found, wanted


def whole_loss(logits, labels):
    valid = labels != -100
    logp = logits[valid].log_softmax(-1)
    return -logp.gather(-1, labels[valid][:, None]).sum(), valid.sum()


@pytest.mark.verifies("xtrain.pipeline_parallel.shared:SharedGradients")
def test_stages_of_the_decoder_train_as_the_whole_model(world):
    for name in ("one_f_one_b", "zb_v", "dualpipe"):
        for found, wanted in world(2).run(train_model, name, name != "zb_v"):
            assert found == pytest.approx(wanted, abs=1e-12)
            assert len(set(wanted)) == 3
