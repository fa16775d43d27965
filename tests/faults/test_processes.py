"""One rank dies, stops, fails or is told to end: what the others do, what is saved."""

import contextlib
import dataclasses
import os
import re
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.faults.cases import ALL, CASES, CUT, DEATHS, DISK, STOPS, Case
from tests.faults.runner import Ended, run_ranks
from tests.faults.trained import select
from tests.train.test_run import MODEL, close
from xtrain.checkpoint import latest
from xtrain.comm.flight_recorder_files import read_dumps
from xtrain.comm.flight_recorder_report import diagnose
from xtrain.model import XtrainConfig
from xtrain.plan import Layout
from xtrain.testing import World
from xtrain.train.overrides import overridden
from xtrain.train.phases import Place, call_of
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Checkpoint, Data, Log
from xtrain.train.run import train
from xtrain.train.stopping import STATUS, Stopping

pytestmark = pytest.mark.processes("faults are of processes")
STEPS, STEP = 4, 2
SLACK = 30.0
"""Seconds that a busy machine may add to a timeout."""
NOBODY = (-1, "", "", 0)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 8}
LAYOUTS = {
    "data": Layout(data=2, zero=2, micro_batches=2),
    "tensor": Layout(tensor=2, micro_batches=2),
    "pipeline": Layout(pipeline=2, micro_batches=2),
    "context": Layout(context=2, micro_batches=2),
    "expert": Layout(data=2, expert=2, micro_batches=2),
    ALL: Layout(data=2, expert=2, tensor=2, pipeline=2, context=2, micro_batches=2),
}
"""Of these, data has its optimizer's state and gradients in shards."""


def recipe(axis: str, folder: Path, layout: Layout, timeout: float = 60.0) -> Recipe:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n".join(f"line {n % 7}: {n * n}" for n in range(200)))
    sizes = EXPERTS if axis in ("expert", ALL) else {}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2} | sizes
    names = {f: getattr(MODEL, f) for f in ("vocab_size", "padded_vocab_size")}
    return Recipe(
        steps=STEPS, dtype="float64", device="cpu", threads=1, timeout=timeout,
        global_batch=8, layout=layout, data=Data(path=str(text), sequence=8),
        model=XtrainConfig(
            hidden_size=8, num_hidden_layers=2, **({"intermediate_size": 12} | sizes),
            **names,
        ),
        checkpoint=Checkpoint(folder=str(folder / "run"), every=1),
        log=Log(flight_recorder=str(folder / "calls")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of one process, by kind of model."""
    known: dict[bool, list[float]] = {}

    def losses(axis: str) -> list[float]:
        experts = axis in ("expert", ALL)
        if experts not in known:
            made = recipe(axis, tmp_path_factory.mktemp("one"), Layout())
            known[experts] = train(made).losses
        return known[experts]

    (
        losses("expert"),
        losses("data"),
    )  # and all that ranks import, before they are forked
    return losses


def names_its_place(end: Ended, rank: int, step: int, victim: int) -> bool:
    """Rank, step, phase and call; no call if the victim has told the others why.

    A rank that ends itself in its start has printed them.
    """
    place = f"rank {rank}, step {step}, " if step else f"rank {rank}, "
    call = r", in \w+ \(\S+\.py:\d+\)"
    if f"rank {victim}: " in end.error and "ArithmeticError" in end.error:
        call = ""
    told = rf"^{place}[a-z ]+{call}(, group \w+: no answer in \d+ s)?$"
    return re.search(told, end.error or end.output, re.MULTILINE) is not None


def is_waited_for(case: Case) -> bool:
    """A rank that ends closes its connections; the others learn of the rest by time.

    While groups are made, ranks wait for one that is not connected yet. A pipeline
    keeps an error up to the end of the step, where ranks of other axes wait for it.
    """
    if case.axis != ALL or case.fault in ("SIGSTOP", CUT):
        return case.fault in ("SIGSTOP", CUT)
    kept = case.fault == "exception" and case.phase in ("forward", "backward")
    return case.phase == "start" or kept


def timeout_of(case: Case) -> float:
    """Seconds: short where it is waited for."""
    if not is_waited_for(case):
        return 60.0
    return 30.0 if case.axis == ALL else 6.0


def disturbed(
    case: Case, folder: Path, nodes: Sequence[str] = ()
) -> tuple[list[Ended], int]:
    """The ends of all ranks, and which one was hit; see `run_ranks` on nodes."""
    layout = LAYOUTS[case.axis]
    size = layout.data * layout.tensor * layout.pipeline * layout.context
    victim = 0 if case.fault == DISK else size - 1
    made = recipe(case.axis, folder, layout, timeout_of(case))
    step = 0 if case.phase == "start" else STEP
    fault = victim, case.fault, case.phase, step
    return run_ranks(made, size, fault, folder, nodes=nodes), victim


def goes_on(case: Case, folder: Path, saved: int, expected) -> None:
    """In another layout: what was saved loads, and the curve is the undisturbed one."""
    if saved:
        assert latest(folder / "run").name == f"step-{saved:08d}"
    made = recipe(case.axis, folder, Layout())
    again = run_ranks(made, 1, NOBODY, folder)[0]
    assert again.code == 0, again
    assert close(again.losses, expected[saved:])


@pytest.mark.parametrize("case", select(c for c in CASES if c.fault in DEATHS))
def test_the_others_end_and_name_their_place(case, tmp_path, undisturbed):
    ends, victim = disturbed(case, tmp_path)
    step = 0 if case.phase == "start" else STEP
    limit = (timeout_of(case) if is_waited_for(case) else 0.0) + SLACK
    for rank, end in enumerate(ends):
        if rank != victim:
            assert end.code == 1, (rank, end)
            assert names_its_place(end, rank, step, victim), (rank, end)
            assert end.after < limit, (rank, end)
    report = str(diagnose(read_dumps([tmp_path / "calls"])))
    assert f"rank {victim}" in report
    if case.fault == "exception":
        place = "start" if case.phase == "start" else f"step {STEP}, {case.phase}"
        assert "ArithmeticError: made by the test" in report
        assert f"rank {victim}, {place}" in ends[victim].error.replace(
            "forward and backward", case.phase
        )
    saved = 0 if case.phase == "start" else STEP - 1
    goes_on(case, tmp_path, saved, undisturbed(case.axis))


@pytest.mark.parametrize("case", select(c for c in CASES if c.fault in STOPS))
def test_all_save_and_lose_no_step(case, tmp_path, undisturbed):
    ends, _ = disturbed(case, tmp_path)
    expected = undisturbed(case.axis)
    saved = {"start": 1, "checkpoint": STEP + 1}.get(case.phase, STEP)
    for end in ends:
        assert (end.code, end.step) == (STATUS, saved), end
        assert close(end.losses, expected[:saved])
    goes_on(case, tmp_path, saved, expected)


def test_a_rank_that_waits_for_one_that_is_gone_ends_at_sigterm(tmp_path):
    """Rank 1 is stopped; rank 0 is told to end while it waits inside C++."""
    made = recipe("data", tmp_path, LAYOUTS["data"])
    kept = dataclasses.replace(made.checkpoint, grace=1.0)

    def terminate(processes) -> None:
        while not (tmp_path / "fault").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(processes[0].pid, signal.SIGTERM)

    made = dataclasses.replace(made, checkpoint=kept)
    began = time.monotonic()
    fault = (1, "SIGSTOP", "backward", STEP)
    end = run_ranks(made, 2, fault, tmp_path, terminate)[0]
    assert time.monotonic() - began < 60.0  # the timeout, which was not waited for
    assert end.code == STATUS
    assert "rank 0, step 2, backward: SIGTERM, and the ranks have not met" in end.output
    assert "rank 1" in str(diagnose(read_dumps([tmp_path / "calls"])))


def place_of_error() -> list[str]:
    """On every rank: an error of its own, and a call that one rank never makes."""
    place, found = Place(), []
    place.enter("backward", 7)
    with contextlib.suppress(ArithmeticError), place.named():
        try:
            raise ArithmeticError("its own")
        except ArithmeticError as error:
            found.append(str(call_of(error)))
            raise
    for later in (False, True):
        short = dist.new_group(timeout=timedelta(seconds=1))
        if dist.get_rank() == 1:
            continue
        try:
            with place.named():
                work = dist.all_reduce(torch.ones(1), group=short, async_op=later)
                work.wait() if later else None
        except RuntimeError as error:
            found += error.__notes__
    return found


@pytest.mark.verifies("xtrain.train.phases:Place", "xtrain.train.phases:call_of")
def test_an_error_carries_rank_step_phase_and_call():
    with World(2) as fresh:
        first, other = fresh.run(place_of_error)
    assert other == ["None"]
    place = r"rank 0, step 7, backward, in"
    own, call, wait = first
    assert own == "None"
    assert re.fullmatch(place + r" all_reduce \(faults/test_processes.py:\d+\)", call)
    assert re.fullmatch(place + r" wait \(faults/test_processes.py:\d+\)", wait)


@pytest.mark.verifies("xtrain.train.stopping:Stopping")
@pytest.mark.parametrize("agreed", [False, True])
def test_grace_ends_with_the_step_in_which_all_have_met(monkeypatch, capsys, agreed):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with Stopping(grace=0.1) as stopping:
        stopping.agreed = agreed
        signal.raise_signal(signal.SIGTERM)
        assert stopping.asked
        end = time.monotonic() + (1.0 if agreed else 60.0)
        while not ended and time.monotonic() < end:
            time.sleep(0.05)
    assert set(ended) == (set() if agreed else {STATUS})
    assert ("have not met in 0.1 s" in capsys.readouterr().err) != agreed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.verifies("xtrain.train.recipe:Recipe")
@pytest.mark.parametrize("name", ["timeout", "checkpoint.grace"])
def test_a_time_that_is_not_positive_is_refused(name, tmp_path):
    made = recipe("data", tmp_path, Layout())
    with pytest.raises(ValueError, match=f"{name.split('.')[-1]}.*-1"):
        overridden(made, [f"--{name}=-1"])
