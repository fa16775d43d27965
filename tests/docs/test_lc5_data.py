"""What the page on pipeline and data ranks draws and counts."""

import pytest

from xtrain.schedules import SCHEDULES, parse_actions
from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import data

RUNNER = "xtrain.pipeline_parallel.runner:PipelineRunner"


@pytest.mark.verifies(RUNNER)
def test_each_wrapper_sends_over_data_ranks_what_its_formula_says(on_ranks):
    table = data.sent_over_data()
    numbers = {name: list(map(float, cells)) for name, *cells in table.rows}
    for name in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP, weights kept"):
        few, many, update = numbers[name]
        assert few == many  # once in a step
        assert round(few + update, 1) == 1.0
    few, many, _ = numbers["FSDP, weights freed after forward"]
    assert many > few + 2  # once more for each micro-batch, both ways


def test_another_number_than_the_formulas_is_refused(monkeypatch):
    found = {"weights": 1000, "root": 100, "step": 2000, "pipeline": 0, "update": 0}
    monkeypatch.setattr(runs, "remembered", lambda *_: [found] * 4)
    with pytest.raises(EvidenceError, match="ddp: step sends 2000.0, not 1000.0"):
        data.measured("ddp", 4)


@pytest.mark.verifies(RUNNER)
def test_the_picture_is_of_what_ranks_did(on_ranks):
    drawing = data.when_stages_reduce("one_f_one_b", ranks=2, micro_batches=3)
    assert drawing.count(">sum</text>") == 2
    assert drawing.count("REDUCE</title>") == 2


def test_ranks_that_reduce_early_or_in_another_order_are_not_drawn(monkeypatch):
    schedule = SCHEDULES["one_f_one_b"](2, 2)
    right = [" ".join(map(str, order)) for order in schedule.actions]
    right = [f"{order} {rank}REDUCE" for rank, order in enumerate(right)]
    first, *rest = right[0].split()
    for order, words in (
        (" ".join([first, "0REDUCE", *rest]), "does not end with its reduction"),
        (" ".join([*rest[:-1], first, "0REDUCE"]), "not do what the schedule says"),
    ):
        orders = [list(parse_actions(text)) for text in (order, right[1])]
        with pytest.raises(EvidenceError, match=words):
            data.drawing("one_f_one_b", 2, orders, reduction=2.0)
    found = [[first, *rest], rest, right[1].split(), right[1].split()]
    monkeypatch.setattr(runs, "remembered", lambda *_: found)
    with pytest.raises(EvidenceError, match="data ranks of a stage did different"):
        data.when_stages_reduce("one_f_one_b", ranks=2, micro_batches=2)
