"""Training steps as trials: wrong training is not timed; memory and wire bytes."""

import os
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.bench.test_runner import SHORT
from xtrain.bench import Case, Contestant, Race, RaceError, Trial, peak_memory
from xtrain.bench.races import lc2, lc3, lc4
from xtrain.bench.runner import run_measurement
from xtrain.bench.training_trials import (
    CHECKED,
    SEND,
    TOLERANCE,
    Shape,
    adamw,
    batch_of,
    config_for,
    config_of,
    model_for,
    training_trial,
)
from xtrain.comm import CommLedger
from xtrain.data_parallel import NaiveDataParallel

TINY = Shape(layers=2, batch=1, sequence=8)
SIZE = 4096
MiB = 2**20


@pytest.mark.parametrize("size", [SIZE, 2 * MiB, 16 * MiB])
def test_the_model_is_the_widest_that_fits(size):
    for shape in (TINY, SEND):
        config = config_for(size, shape.layers)
        numel = sum(p.numel() for p in model_for(Case(size, 2), shape).parameters())
        assert numel == config.parameters
        assert 4 * numel <= size or config == config_for(1, shape.layers)
        wider = config_of(config.hidden_size + 32, shape.layers)
        assert 4 * wider.parameters > size


def first_loss(data_rank, case):
    """Of this rank, before anything was averaged: it tells which batch it was."""
    trial = training_trial(TINY, alone, "gloo", case, data_rank)
    trial.call()
    return trial.outputs[0][0].item()


def half_of_rank():
    """As on a mesh of data and tensor ranks: two ranks hold one model."""
    return dist.get_rank() // 2


def test_ranks_of_one_model_train_on_the_same_batch(world):
    case = Case(SIZE, 4)
    own = world(4).run(first_loss, dist.get_rank, case)
    assert len(set(own)) == 4
    shared = world(4).run(first_loss, half_of_rank, case)
    assert shared == [own[0], own[0], own[1], own[1]]
    assert not torch.equal(batch_of(TINY, 0), batch_of(TINY, 1))


def alone(model, group):
    """Forgets to average gradients."""
    return model, adamw(model)


def slower(model, group):
    """Another learning rate: right gradients, wrong updates."""
    wrapped, optimizer = lc2.our_ddp(model, group)
    optimizer.param_groups[0]["lr"] = 1e-4
    return wrapped, optimizer


def race_of(*wraps, **changes):
    sides = [
        Contestant(wrap.__name__, partial(training_trial, TINY, wrap, "gloo"))
        for wrap in (lc2.torch_ddp, *wraps)
    ]
    options = {"tolerance": TOLERANCE, "checked_calls": CHECKED} | changes
    return Race("test", "A test", tuple(sides), sizes=(SIZE,), **options)


@pytest.mark.parametrize("wrong", [alone, slower])
def test_who_trains_wrongly_is_not_timed(world, wrong):
    with pytest.raises(RaceError, match=f"{wrong.__name__}.*output 0 differs"):
        run_measurement(world(2), race_of(lc2.our_ddp, wrong), SIZE, SHORT)


def test_one_checked_call_would_not_have_noticed(world):
    """The first loss is that of the initial weights, equal on all sides."""
    race = race_of(slower, checked_calls=1)
    assert run_measurement(world(2), race, SIZE, SHORT).result("slower").kept == 2


def naive(model, group):
    wrapped = NaiveDataParallel(model, group)
    inner = adamw(model)

    class Reducing:
        zero_grad = inner.zero_grad

        def step(self):
            wrapped.reduce_gradients()
            inner.step()

    return wrapped, Reducing()


def test_an_independent_side_agrees(world):
    found = run_measurement(world(2), race_of(naive), SIZE, SHORT)
    assert found.result("naive").kept == 2


# ------------------------------------------------------------------------- memory


def holding(nbytes: int, case: Case) -> Trial:
    """Holds 4 MiB always and `nbytes` while it is called."""
    kept = torch.ones(MiB)

    def call():
        torch.ones(nbytes // 4).sum()

    return Trial(call, [kept])


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs /proc")
def test_the_peak_is_what_a_step_holds(world, xtrain_worlds):
    if xtrain_worlds.device != "cpu":
        pytest.skip("on a GPU torch's allocator counts")
    large, small = (Contestant("c", partial(holding, n * MiB)) for n in (64, 16))
    race = Race(
        "memory",
        "Memory",
        (large, Contestant("small", small.make)),
        sizes=(SIZE,),
        memory=True,
        tolerance=float("inf"),
    )
    first, second = run_measurement(world(2), race, SIZE, SHORT).results
    for high, low in zip(first.peak_bytes, second.peak_bytes, strict=True):
        assert 68 * MiB <= high <= 80 * MiB
        assert 20 * MiB <= low <= 32 * MiB


def test_races_that_do_not_ask_measure_no_memory(world):
    measurement = run_measurement(world(2), race_of(lc2.our_ddp), SIZE, SHORT)
    assert [result.peak_bytes for result in measurement.results] == [None, None]


def test_without_the_kernels_files_there_is_no_peak(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "missing")
    contestant = Contestant("c", partial(holding, 4))
    assert peak_memory.peak_on_rank(contestant, Case(SIZE, 1), 1) is None


# --------------------------------------------------- what gloo sends for a step

SIDES = {  # how many halves of a ring all-reduce: gloo's reduce-scatter counts as two
    lc2.torch_ddp: 2,
    lc2.our_ddp: 2,
    lc3.torch_zero1: 3,  # all-reduce, then every rank broadcasts its part
    lc3.our_zero_with_torchs: 3,
    lc3.our_zero: 2,
    lc3.torch_fsdp: 4,  # gather, gather, reduce-scatter; but the root is gathered once
    lc3.our_fsdp_with_torchs: 4,
    lc3.our_fsdp: 3,
}


def wire_of_a_step(wrap):
    case = Case(2 * MiB, dist.get_world_size())
    trial = training_trial(TINY, wrap, "gloo", case)
    trial.call()  # connections and first-step surprises
    dist.barrier()
    with CommLedger() as ledger:
        trial.call()
        dist.barrier()
    return ledger.wire_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="TCP counters are Linux's")
@pytest.mark.parametrize("wrap", SIDES, ids=lambda wrap: wrap.__name__)
def test_wire_bytes_of_a_step_over_gloo_follow_the_formula(world, xtrain_worlds, wrap):
    if (xtrain_worlds.backend, xtrain_worlds.device) != ("gloo", "cpu"):
        pytest.skip("about gloo's sockets")
    size = 4
    model = model_for(Case(2 * MiB, size), TINY)
    numel = sum(p.numel() for p in model.parameters())
    layers = sum(p.numel() for layer in model.layers for p in layer.parameters())
    halves = SIDES[wrap] * numel
    if "fsdp" in wrap.__name__:
        halves -= numel - layers
    formula = (size - 1) * halves * 4  # of all ranks together
    sent = sum(world(size).run(wire_of_a_step, wrap))
    assert formula <= sent <= 1.02 * formula + 100_000


HEADED = lc4.SHAPES["batch1"]  # as many key heads as ranks
TENSOR_SIDES = [
    (side, split) for side in (lc4.torch_tp, lc4.our_tp) for split in (0, 1)
]


def wire_of_tensor_parallel_steps():
    """By side: bytes through the sockets in a step, after one that connects."""
    sent = []
    for side, split in TENSOR_SIDES:
        trial = training_trial(
            HEADED,
            partial(side, sequence_parallel=bool(split)),
            "gloo",
            Case(2 * MiB, dist.get_world_size()),
            lc4.first_batch,
            lc4.loss_parallel if side is lc4.torch_tp else nullcontext,
        )
        trial.call()
        dist.barrier()
        with CommLedger() as ledger:
            trial.call()
            dist.barrier()
        sent.append(ledger.wire_bytes)
    return sent


@pytest.mark.verifies("xtrain.bench.races.lc4:traffic")
@pytest.mark.skipif(sys.platform != "linux", reason="TCP counters are Linux's")
def test_tensor_parallel_steps_send_what_the_plan_says(world, xtrain_worlds):
    """torch's without sequence parallelism, too; with it gloo scatters by reducing."""
    if (xtrain_worlds.backend, xtrain_worlds.device) != ("gloo", "cpu"):
        pytest.skip("about gloo's sockets")
    case = Case(2 * MiB, 4)
    sent = zip(*world(4).run(wire_of_tensor_parallel_steps), strict=True)
    for (side, split), by_rank in zip(TENSOR_SIDES, sent, strict=True):
        formula = lc4.traffic(HEADED, bool(split), case).total
        if side is lc4.torch_tp and split:
            assert sum(by_rank) > 1.1 * formula
        else:
            assert formula <= sum(by_rank) <= 1.02 * formula + 100_000
