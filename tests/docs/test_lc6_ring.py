"""The animations and the table of the page on ring attention are of real runs."""

import pytest

from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc6 import ring


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_keys_visit_every_rank_and_a_rank_holds_those_of_one(on_ranks, ranks):
    data = ring.ring_attention_keys(ranks).data
    assert len(data["steps"]) == ranks - 1
    for states in (data["initial"], *(step["state"] for step in data["steps"])):
        assert all(sum(map(bool, row)) == 1 for row in states)
    assert {m["op"] for step in data["steps"] for m in step["messages"]} == {"copy"}


def test_gradients_grow_on_their_way_and_come_home(on_ranks):
    data = ring.ring_attention_gradients(4).data
    assert len(data["steps"]) == 4, "one hop more than the keys"
    home = [row[rank] for rank, row in enumerate(data["steps"][-1]["state"])]
    assert home == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    first = data["steps"][0]["messages"]
    assert (first[0]["src"], first[0]["dst"], first[0]["content"]) == (0, 1, [[0]])
    assert [m["op"] for m in first] == ["add", "add", "add", "copy"]


def test_the_keys_travel_again_in_backward(on_ranks):
    for rank in ring.told(3):
        assert rank["keys"] == rank["keys again"]


def test_gradients_that_do_not_come_home_stop_the_build(on_ranks, monkeypatch):
    found = [dict(rank) for rank in ring.told(3)]
    found[0]["home"] = [0, 1]
    monkeypatch.setattr(ring, "told", lambda ranks: found)
    with pytest.raises(EvidenceError, match="came home"):
        ring.ring_attention_gradients(3)
    found[1]["keys"] = [1, 2]
    with pytest.raises(EvidenceError, match="rank 1 has had those of"):
        ring.ring_attention_keys(3)


def test_the_table_is_of_counted_bytes(on_ranks, monkeypatch):
    rows = ring.ring_attention_bytes().rows
    assert len(rows) == len(ring.CASES)
    assert all(row[3] == row[4] and row[5] == row[6] for row in rows)
    monkeypatch.setattr(ring, "context_bytes", lambda *sizes, **more: (1, 1))
    with pytest.raises(EvidenceError, match="2 ranks, float32"):
        ring.ring_attention_bytes()
