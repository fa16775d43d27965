"""Tables of the errata and the questions of lc5: played, counted, checked by hand."""

import pytest

from xtrain.schedules import simulate
from xtrain_docs.blocks import registry
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import errata, pair_order
from xtrain_docs.lectures.lc5.tables import (
    held_by,
    idle_of,
    messages_of,
    step_of,
    versions_kept,
)

REGISTRY = registry("table")


def cells(name, *options):
    """A table's rows, which its Markdown can be made of."""
    table = REGISTRY[name](*options)
    assert table.markdown()
    return table.rows


def test_equal_steps_and_unequal_memory():
    rows = cells("idle_of_zero_bubble")
    assert [[*row[2:4], *row[5:]] for row in rows] == [
        ["9", "45", "4", "4"], ["3", "39", "4", "4"], ["0", "39", "7", "7"],
        ["21", "93", "8", "8"], ["7", "79", "8", "8"], ["0", "79", "15", "15"],
    ]  # fmt: skip
    assert rows[4][4] == rows[5][4] == f"{79 / 72:.3f}"


def test_idle_times_of_both_conventions():
    assert [row[3:] for row in cells("two_conventions")] == [
        ["21", "8", "1"],
        ["7", "8", "1"],
        ["6", "9", "2"],
    ]


def test_exchanges_are_hidden_in_pairs_only():
    rows = {row[0]: row[1:] for row in cells("exchanges_hidden")}
    # 9 of 20 and 69 of 80 are in pairs, which compute for 3
    assert rows["1"] == ["40", "0", "22", "45 %", "86 %"]
    assert rows["3"] == ["120", "3", "93", "22 %", "43 %"]
    sizes = ("one_f_one_b", 8, 20)
    assert (idle_of(*sizes), step_of(*sizes), step_of(*sizes, 1.0)) == (21, 81, 135)
    assert idle_of("dualpipe", 8, 20) == 6


def test_chunks_divide_the_idle_time_and_multiply_the_messages():
    chunks = (1, 2, 4)
    assert [idle_of("interleaved", 4, 8, v) for v in chunks] == [9, 4.5, 2.25]
    assert [messages_of(4, 8, v) for v in chunks] == [6, 14, 30]


def test_a_table_that_contradicts_what_is_played_is_refused(monkeypatch):
    def slower(schedule, *times, **options):
        return simulate(schedule, 1.0, 1.5, 1.0, **options)

    monkeypatch.setattr(errata, "played", lambda name, p, m: slower(
        errata.SCHEDULES[name](p, m)))  # fmt: skip
    for name in ("idle_of_zero_bubble", "two_conventions"):
        with pytest.raises(EvidenceError, match="said to be"):
            REGISTRY[name]()
    monkeypatch.setattr(errata, "exposed", lambda *sizes: (0.0, 0.0))
    with pytest.raises(EvidenceError, match="dualpipe"):
        REGISTRY["exchanges_hidden"]()


def test_an_order_that_cannot_be_run_is_no_table(monkeypatch):
    assert len(cells("order_of_a_pair")) == 4
    assert cells("order_of_a_pair", "two_forwards")[-1] == ["", "F(combine) of 1"]
    monkeypatch.setitem(pair_order.ORDERS, "notes", pair_order.NOTES)
    with pytest.raises(EvidenceError, match=r"F\(MLP\) of 1 needs F\(attention\)"):
        REGISTRY["order_of_a_pair"]("notes")


def test_schedules_with_sends_that_wait():
    rows = {row[0]: row[1:] for row in cells("blocking_sends")}
    assert rows["GPipe"] == ["runs", "runs", "runs"]
    assert rows["1F1B"] == ["waits at `0SEND_F3`", "runs", "runs"]
    assert rows["DualPipe"][1] == "waits"


def test_numbers_of_spoken_answers():
    assert [held_by("one_f_one_b", 8, 24, rank) for rank in (0, 3, 7)] == [8, 5, 1]
    assert [held_by("zb_h1", 8, 24, 7, until) for until in "BW"] == [1, 8]
    assert [versions_kept(8, 24, rank) for rank in (0, 7)] == [8, 1]
    # attention, MLP and two exchanges of each micro-batch, one after the other or not
    orders = ("pair", "two_forwards", "two_backwards")
    units = pair_order.units_of_pair
    assert [units(order, in_turn=True) for order in orders] == [8, 8, 8]
    assert [units(order) for order in orders] == [4, 5, 5]
