"""Numbers and tables of the errata and the questions of lc5."""

from xtrain_docs.blocks import registry
from xtrain_docs.lectures.lc5.common import held_by, idle_of, messages_of, step_of
from xtrain_docs.lectures.lc5.errata import units_of_pair, waited


def test_exchanges_are_hidden_in_pairs_only():
    # 9 of 20 and 69 of 80 are in pairs, which compute for 3
    assert [waited("dualpipe", 8, 20, x) for x in (1, 3)] == [22, 93]
    assert [waited("one_f_one_b", 8, 20, x) for x in (1, 3)] == [40, 120]
    sizes = ("one_f_one_b", 8, 20)
    assert (idle_of(*sizes), step_of(*sizes), step_of(*sizes, 1.0)) == (21, 81, 135)
    assert idle_of("dualpipe", 8, 20) == 6


def test_chunks_divide_the_idle_time_and_multiply_the_messages():
    chunks = (1, 2, 4)
    assert [idle_of("interleaved", 4, 8, v) for v in chunks] == [9, 4.5, 2.25]
    assert [messages_of("interleaved", 4, 8, v) for v in chunks] == [6, 14, 30]
    assert messages_of("zb_v", 4, 8) == 12  # the turn of a V is no message


def test_the_tables_of_a_pair():
    table = registry("table")["order_of_a_pair"]
    assert len(table().rows) == 4
    assert table("two_forwards").rows[-1] == ["", "F(combine) of 1"]


def test_numbers_of_spoken_answers():
    assert [held_by("one_f_one_b", 8, 24, rank) for rank in (0, 3, 7)] == [8, 5, 1]
    assert [held_by("zb_h1", 8, 24, 7, until) for until in "BW"] == [1, 8]
    # attention, MLP and two exchanges of each micro-batch, one after the other or not
    orders = ("pair", "two_forwards", "two_backwards")
    assert [units_of_pair(order, in_turn=True) for order in orders] == [8, 8, 8]
    assert [units_of_pair(order) for order in orders] == [4, 5, 5]
