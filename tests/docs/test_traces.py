"""Traces: decoded from real runs, and refused when they contradict themselves."""

import json
import re

import pytest

from xtrain_docs import kept, runs
from xtrain_docs.blocks import registry
from xtrain_docs.traces import Trace
from xtrain_docs.traces.record import TraceError, decode, encode, replay


def test_numbers_tell_cell_and_ranks():
    assert decode(encode(3, 5)) == (5, [3])
    assert decode(sum(encode(r, 7) for r in (0, 2, 5))) == (7, [0, 2, 5])
    assert decode(0) is None
    with pytest.raises(TraceError, match="mixes"):
        decode(encode(0, 1) + encode(1, 2))


def two_ranks(**changes):
    """An all-reduce of one cell: 1 sends to 0, which adds and sends back."""
    whole = encode(0, 0) + encode(1, 0)
    run = {
        "kind": "all_reduce",
        "ranks": 2,
        "cells": 1,
        "rounds": [[(1, 0, (encode(1, 0),))], [(0, 1, (whole,))]],
        "befores": [[encode(0, 0)], [encode(1, 0)]],
        "afters": [[whole], [whole]],
    }
    return replay(**(run | changes))


def test_a_replay_shows_what_each_rank_holds():
    data = two_ranks()
    assert data["initial"] == [[[0]], [[1]]]
    assert [s["state"] for s in data["steps"]] == [
        [[[0, 1]], [[1]]],
        [[[0, 1]], [[0, 1]]],
    ]
    assert [s["messages"][0]["op"] for s in data["steps"]] == ["add", "copy"]


def test_a_message_its_sender_did_not_have_is_refused():
    with pytest.raises(TraceError, match="rank 1 sends .* but holds"):
        two_ranks(rounds=[[(1, 0, (encode(0, 0),))], []])


def test_an_end_that_the_messages_do_not_make_is_refused():
    with pytest.raises(TraceError, match="rank 1 ends with"):
        two_ranks(rounds=[[(1, 0, (encode(1, 0),))]])


def test_the_ring_as_it_really_runs(nothing_kept):
    trace = registry("trace").run("ring_all_reduce", {"ranks": 3})
    data = trace.data
    assert len(data["steps"]) == 4
    for step in data["steps"]:
        assert sorted((m["src"], m["dst"]) for m in step["messages"]) == [
            (0, 1), (1, 2), (2, 0)
        ]  # fmt: skip
        assert all(len(m["cells"]) == 1 for m in step["messages"])
    ops = [{m["op"] for m in s["messages"]} for s in data["steps"]]
    assert ops == [{"add"}, {"add"}, {"copy"}, {"copy"}]
    assert data["steps"][-1]["state"] == [[[0, 1, 2]] * 3] * 3


def test_a_trace_is_read_back_while_nothing_changes(nothing_kept, monkeypatch):
    run = registry("trace").run
    first = run("all_to_all_single", {"ranks": 2})
    monkeypatch.setattr(runs, "again", lambda asked: pytest.fail("ran again"))
    assert run("all_to_all_single", {"ranks": 2}) == first
    roots = {root for e in kept.asked["traces_record"].values() for root in e.roots}
    assert "src/xtrain/comm/all_to_all.py" in roots


def test_a_trace_is_called_by_words_and_not_by_a_function():
    data = two_ranks() | {"title": "one_exchange", "ranks": 2, "cells": 1}
    with pytest.raises(ValueError, match="one_exchange"):
        Trace(data)
    named = Trace(data | {"title": "a toy all-reduce"})
    assert named.caption("").startswith("A toy all-reduce on 2 ranks, recorded")
    assert "Messages of a toy all-reduce, 2 ranks" in named.html()


def test_the_element_carries_data_and_a_table_for_readers_without_scripts():
    data = two_ranks() | {
        "title": "toy", "kind": "all_reduce", "ranks": 2, "cells": 1, "additive": True,
    }  # fmt: skip
    out = Trace(data).html()
    packed = re.search(r'data-trace="([^"]*)"', out)[1].replace("&quot;", '"')
    assert json.loads(packed) == data
    assert out.count("<tr>") == 3
    assert (
        "<td>1</td><td>1</td><td>0</td><td>the whole tensor</td><td>are added</td>"
        in out
    )
    assert "<script" not in out
