"""The picture of the runner has every action and every message."""

from xtrain_docs.lectures.lc5 import runner


def test_the_picture_has_every_action_and_an_arrow_for_every_message():
    drawing = runner.runner_executed(ranks=2, micro_batches=2)
    assert drawing.count("<rect") == 2 * 2 * 2
    assert drawing.count("<line") == 3 * 2 * 2
    for words in ("0F0", "1BW1", "1REDUCE", "rank 1"):
        assert f">{words}<" in drawing


def test_a_receive_is_drawn_after_its_send():
    places = runner.placed([["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]])
    assert places[1, 0][0] > places[0, 1][0] > places[0, 0][0]
