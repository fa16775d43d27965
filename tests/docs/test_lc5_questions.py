"""Tables of the errata and the questions of lc5: played, counted, checked by hand."""

import pytest

from xtrain.schedules import simulate
from xtrain_docs.blocks import registry
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import errata, interview, pair_order
from xtrain_docs.lectures.lc5.tables import held_by

REGISTRY = registry("table")


def cells(name, *options):
    """A table's rows, which its Markdown can be made of."""
    table = REGISTRY[name](*options)
    assert table.markdown()
    return table.rows


def test_slots_of_the_notes_stand_beside_those_of_the_staircase():
    rows = cells("notes_staircase")
    assert [row[3] for row in rows] == ["0", "1", "2", "3", "7", "6", "5", "4"]
    early = {row[0]: row[2] for row in rows if row[2]}
    assert set(early) == {"`2F0`", "`1B0`", "`2B0`"}
    assert early["`2F0`"] == "needs `1F0`, which is not done"


def test_equal_steps_and_unequal_memory():
    assert cells("same_bubble") == [
        ["GPipe", "33", "9", "8"],
        ["1F1B", "33", "9", "4"],
    ]
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
    one, dual = cells("dualpipe_or_1f1b")
    assert one[1:] == ["21", "26 %", "8", "1", "81", "135"]
    assert dual[1:5] == ["6", "9 %", "9", "2"]


def test_chunks_divide_the_idle_time_and_multiply_the_messages():
    rows = cells("chunks_of_a_rank")
    assert [row[1] for row in rows] == ["9", "4.5", "2.25"]
    assert [row[4] for row in rows] == ["6", "14", "30"]


def test_tables_of_batches_and_versions():
    assert [row[1] for row in cells("micro_batches_of_a_batch")] == [
        "128", "32", "16", "8",
    ]  # fmt: skip
    between, versions = cells("weight_versions")
    assert between[1:] == ["3", "2", "1", "0"]
    assert versions[1:] == ["4", "3", "2", "1"]


def test_a_table_that_contradicts_what_is_played_is_refused(monkeypatch):
    def slower(schedule, *times, **options):
        return simulate(schedule, 1.0, 1.5, 1.0, **options)

    monkeypatch.setattr(errata, "played", lambda name, p, m: slower(
        errata.SCHEDULES[name](p, m)))  # fmt: skip
    for name in ("same_bubble", "idle_of_zero_bubble", "two_conventions"):
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


def test_what_autograd_holds_is_counted_or_refused(on_ranks, monkeypatch):
    rows = cells("held_in_a_run", "one_f_one_b", 2, 4)
    assert rows == [["1F1B", "2", "1", "3"]]
    real = interview.played
    monkeypatch.setattr(interview, "played", lambda name, p, m: real("gpipe", p, m))
    with pytest.raises(EvidenceError, match="ranks held"):
        interview.held_in_a_run("one_f_one_b", 2, 4)


def test_errors_of_gradients_by_divisor(on_ranks, monkeypatch):
    right, *wrong = cells("errors_by_divisor")
    assert right[1] == "none"
    for row in wrong:
        assert int(row[1].removesuffix(" %")) > 10
    monkeypatch.setattr("xtrain_docs.lectures.lc5.runs_interview.DIVISORS",
                        tuple(row[0] for row in wrong))  # fmt: skip
    with pytest.raises(EvidenceError, match="its own rows"):
        interview.errors_by_divisor()


def test_numbers_of_spoken_answers():
    assert [held_by("one_f_one_b", 8, 24, rank) for rank in (0, 3, 7)] == [8, 5, 1]
    assert [held_by("zb_h1", 8, 24, 7, until) for until in "BW"] == [1, 8]
    assert [interview.versions_kept(8, 24, rank) for rank in (0, 7)] == [8, 1]
    # attention, MLP and two exchanges of each micro-batch, one after the other or not
    orders = ("pair", "two_forwards", "two_backwards")
    units = interview.units_of_pair
    assert [units(order, in_turn=True) for order in orders] == [8, 8, 8]
    assert [units(order) for order in orders] == [4, 5, 5]
