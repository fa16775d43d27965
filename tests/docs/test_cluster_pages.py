"""What the pages of the virtual cluster claim about recorded runs."""

import json

import pytest

from xtrain.bench.cluster_fsdp_step import CASES, measure
from xtrain_docs.lectures.cluster import fsdp


def test_steps_of_fsdp_are_those_of_the_closed_form() -> None:
    assert list(fsdp.recorded()) == CASES
    for case, run in fsdp.recorded().items():
        assert run["step"] == pytest.approx(fsdp.fsdp_formula(*case), rel=1e-9)


def test_a_step_runs_as_it_was_recorded() -> None:
    fresh = json.loads(json.dumps(measure(8, 4096)))
    recorded = fsdp.recorded()[8, 4096]
    for found in (fresh, recorded):
        del found["processor_seconds"]
    assert fresh == recorded


def test_a_drawn_step_has_all_of_its_time() -> None:
    run = fsdp.recorded()[256, 1024]
    computes = sum(end - start for start, end in fsdp.pieces(run, "computes"))
    waits = run["step"] * fsdp.fsdp_waiting(256, 1024)
    assert computes + waits == pytest.approx(run["step"])
    assert len(list(fsdp.pieces(run, "all-gather"))) == 2 * run["layers"]
    assert len(list(fsdp.pieces(run, "reduce-scatter"))) == run["layers"]
