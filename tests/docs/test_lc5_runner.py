"""The picture and the tables on the runner are what ran, or stop the build."""

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import runner, runs_runner


@pytest.mark.verifies("xtrain.pipeline_parallel.step:Step")
def test_the_picture_has_every_action_and_an_arrow_for_every_message(on_ranks):
    drawing = runner.runner_executed(ranks=2, micro_batches=2)
    assert drawing.count("<rect") == 2 * 2 * 2
    assert drawing.count("<line") == 3 * 2 * 2
    for words in ("0F0", "1BW1", "1REDUCE", "rank 1"):
        assert f">{words}<" in drawing


def test_a_receive_is_drawn_after_its_send_and_a_list_that_waits_is_refused():
    lists = [["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]]
    places = runner.placed(lists)
    assert places[1, 0][0] > places[0, 1][0] > places[0, 0][0]
    with pytest.raises(EvidenceError, match="no rank goes on"):
        runner.placed([["0F0"], ["1RECV_F0"]])


@pytest.mark.verifies("xtrain.pipeline_parallel.messages:Messages")
def test_the_tables_compare_messages_and_memory_with_their_formulas(on_ranks):
    table = runner.runner_messages(ranks=2, micro_batches=2)
    assert [row[3] for row in table.rows] == ["2", "2", "4"]
    assert [row[1] for row in table.rows] == ["2", "0", ""]
    gpipe, both = runner.runner_memory(ranks=2, sizes=(2, 4)).rows
    assert gpipe[1] == gpipe[2] == both[2] < both[1]


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ("runner_messages", [{"tensors": [3, 1536], "numbers": [1, 8]}] * 2),
        ("runner_memory", [10, 1, 1]),
        ("runner_executed", ["0F0"]),
    ],
)
def test_what_differs_from_the_formula_stops_the_build(monkeypatch, table, found):
    monkeypatch.setattr(runs, "remembered", lambda _, ranks, *more: [found] * ranks)
    with pytest.raises(EvidenceError):
        getattr(runner, table)(ranks=2)
    assert runs_runner.kind_of(8 * 256) == "headers"
