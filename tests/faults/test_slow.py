"""A rank that is slow is named, on every axis, with its seconds; no other one is."""

import json
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.faults.cases import ALL, CASES, SLOW
from tests.faults.trained import LAYOUTS, SEVERAL, recipe, select
from xtrain.cluster import VirtualCluster, advance, now
from xtrain.plan import Layout
from xtrain.train.batches import Batches
from xtrain.train.recipe_parts import Log
from xtrain.train.run import TrainingRun, train
from xtrain.train.stragglers import Seconds, Stragglers, slow_ranks

SYMBOLS = (
    "xtrain.train.stragglers:Stragglers",
    "xtrain.train.stragglers:slow_ranks",
    "xtrain.comm.waiting_time:WaitingTime",
)
NAP = 0.05
"""Seconds of every rank each time in a phase; the slow one's are five."""


def naps(run, phase, nap):
    """Before the optimizer's step, or in a direction of this rank's last layer."""
    update = run.optimizer.step

    def hook(module, inputs, output):
        if phase == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: nap())
        elif phase == "forward":
            nap()

    if phase == "optimizer":
        run.optimizer.step = lambda: (nap(), update())
    list(run.model.parts[0].layers)[-1].register_forward_hook(hook)


def told(made, phase, slow, steps, clock, sleep):
    """Who is told to be slow, by step; one rank is until `steps` are done, of six."""
    run = TrainingRun(made, torch.device("cpu"))
    run.stragglers.close()
    run.stragglers = Stragglers(2, run.mesh, run.device, clock)
    own = dist.get_rank()

    def nap():
        sleep(NAP * (5 if own == slow and run.step < steps else 1))

    naps(run, phase, nap)
    found = {}
    while run.step < 6:
        with run.stragglers.step():
            if phase == "data":
                nap()
            run.train_step(next(run.batches))
        run.step += 1
        compared = run.stragglers.compared(run.batches.seconds_waited)
        if compared:
            found[run.step] = slow_ranks(compared)
    run.close()
    return found


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("case", select(c for c in CASES if c.fault == SLOW))
def test_only_the_slow_rank_is_named_and_only_while_it_is(tmp_path, case):
    for layout in LAYOUTS[case.axis]:
        only_the_slow_rank_is_named(recipe(tmp_path, layout), case.phase)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("layout", SEVERAL, ids=str)
def test_on_several_axes_only_the_slow_rank_is_named(tmp_path, layout):
    only_the_slow_rank_is_named(recipe(tmp_path, layout), "forward")


def only_the_slow_rank_is_named(made, phase):
    """In virtual seconds, which are exact."""
    layout, last = made.layout, made.layout.gpus - 1
    of_layers = phase in ("forward", "backward")
    # What comes last in a step is waited for in the next one, or while ranks compare.
    waited = 2.0 if phase == "optimizer" else 4.0
    for slow in {0, last - last // 4}:
        more = made, phase, slow, 4, now, advance
        results = VirtualCluster(layout.gpus).run(told, *more)
        assert all(result == results[0] for result in results)
        found = results[0]
        assert list(found) == [2, 4, 6] and found[6] == []
        for step in (2, 4):
            (one,) = found[step]
            assert one.numbers["rank"] == slow
            assert one.text.startswith(f"rank {slow} (")
            assert "(5.0 times)" in one.text
            slept = NAP * (layout.micro_batches if of_layers else 1)
            assert one.numbers["busy"] == pytest.approx(5 * slept)
            bubble = NAP * (layout.pipeline - 1) * of_layers
            assert one.numbers["waiting"] == pytest.approx(waited * slept + bubble)


@pytest.mark.processes("the seconds of a rank are those of its process")
@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize(
    "case", select(c for c in CASES if c.fault == SLOW and c.axis != ALL)
)
def test_in_real_processes_the_slow_rank_is_named(world, tmp_path, case):
    """A busy machine may hold up another one for a while: it is named most often."""
    for layout in LAYOUTS[case.axis]:
        more = case.phase, 1, 6, time.perf_counter, time.sleep
        found = world(2).run(told, recipe(tmp_path, layout), *more)[0]
        first = Counter(slow[0].numbers["rank"] for slow in found.values() if slow)
        assert first.most_common(1)[0][0] == 1, found


def sleepy_run(made):
    """A whole run whose rank 1 reads its data slowly."""
    fetch = Batches.__next__

    def slow(self):
        batch = fetch(self)
        if dist.get_rank() == 1:
            time.sleep(0.3)
            self.seconds_waited += 0.3
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "__next__", slow)
        train(made)


@pytest.mark.processes("a class is patched on one rank")
@pytest.mark.verifies(*SYMBOLS, "xtrain.train.run:TrainingRun")
def test_a_run_writes_who_is_slow_and_its_flight_recorder_sees_all_calls(
    world, tmp_path
):
    log = Log(
        jsonl=str(tmp_path / "log"), stragglers=2, flight_recorder=str(tmp_path / "fr")
    )
    made = recipe(tmp_path, layout=Layout(data=2), log=log, steps=5)
    world(2).run(sleepy_run, made)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    slow = {line["step"]: line["slow"] for line in lines if "slow" in line}
    assert list(slow) == [2, 4]
    assert slow[4]["rank"] == 1 and slow[4]["busy"] >= 0.3
    calls = json.loads((tmp_path / "fr" / "rank-1.json").read_text())["entries"]
    steps = [c for c in calls if c["frames"][0]["filename"].endswith("/steps.py")]
    assert len(steps) >= 5 and {c["state"] for c in steps} == {"completed"}


def test_the_rule():
    def ranks(*busy, data=0.0):
        most = max(busy)
        return [Seconds(f"rank {n}", b, most - b, data) for n, b in enumerate(busy)]

    assert slow_ranks([]) == []
    assert slow_ranks(ranks(1.0, 1.4, 1.2, 1.1)) == []
    assert slow_ranks(ranks(0.001, 0.002)) != []  # a tenth of the step, and twice
    short = [Seconds("rank 0", 0.01, 0.99, 0), Seconds("rank 1", 0.05, 0.95, 0)]
    assert slow_ranks(short) == []  # five times, and 4 % of the step
    two = slow_ranks(ranks(0.4, 1.0, 0.4, 2.0, data=1.5))
    assert [slow.numbers["rank"] for slow in two] == [3, 1]
    assert two[0].text == (
        "rank 3 is slow: busy 2.00 s a step, 1.50 s of it for data, the median is "
        "0.40 s (5.0 times); others wait up to 1.60 s a step"
    )


def test_on_a_gpu_it_is_refused():
    with pytest.raises(ValueError, match=r"log\.stragglers=3 on cuda"):
        Stragglers(3, None, torch.device("cuda"))
