"""Tables of lc7's questions: counted in runs, and refused where they disagree."""

import pytest

from xtrain_docs.blocks import registry
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc7 import interview

TABLES = registry("table")


def cells(name, *options):
    """A table's rows, which its Markdown can be made of."""
    table = TABLES[name](*options)
    assert table.markdown()
    return table.rows


def test_ways_to_choose_experts():
    assert interview.combinations(16, 2) == 120
    assert interview.combinations(64, 8) == 4_426_165_368  # DeepSeekMoE's example


def test_splits_of_the_four_all_to_alls(on_ranks, monkeypatch):
    counts, *rows = cells("order_of_exchanges", 2)
    assert counts[1] == "as many numbers for each"
    assert [row[0] for row in rows] == list(interview.PHASES[1:])
    there = [sum(map(int, row[1].split(", "))) for row in rows]
    assert there == [32, there[1], 32, there[1]]  # 16 tokens of a rank, 2 experts each
    assert rows[0][1:] == rows[1][:0:-1] == rows[2][1:] == rows[3][:0:-1]
    found = interview.runs.remembered
    monkeypatch.setattr(
        interview.runs, "remembered",
        lambda *args: [[*one[:2], one[1], *one[3:]] for one in found(*args)],
    )  # fmt: skip
    with pytest.raises(EvidenceError, match="splits"):
        interview.order_of_exchanges(2)


def test_messages_of_an_all_to_all_and_of_a_ring(on_ranks, monkeypatch):
    dispatched, reduced = cells("uneven_exchange", 4)
    assert dispatched[1:3] == ["3", "3"]
    assert reduced[1:4] == ["6", "1", "192"]  # 16 x 6 float64, in 4 chunks
    rows = [int(n) for n in dispatched[4].split(", ")]
    assert sum(rows) == 4 * 16 * 2
    assert len(set(rows)) > 1
    monkeypatch.setattr(
        interview.runs, "remembered",
        lambda *args: [{"dispatch": [[1, 8]], "all-reduce": [[1, 8]]}],
    )  # fmt: skip
    with pytest.raises(EvidenceError, match="dispatch: messages"):
        interview.uneven_exchange(4)


def test_nodes_of_a_token(on_ranks, monkeypatch):
    rows = cells("token_nodes", 64, 8, 8)
    assert [row[0] for row in rows] == ["none", "4", "2"]
    assert float(rows[0][1]) == pytest.approx(float(rows[0][3]), abs=0.05)
    assert [int(row[2]) for row in rows] == [8, 4, 2]
    monkeypatch.setattr(interview.runs, "remembered", lambda *args: [{"5": 1}])
    with pytest.raises(EvidenceError, match="limit 4"):
        interview.token_nodes(64, 8, 8)
