"""Tables beside torch's classes and of checkpoints: refused when a run disagrees."""

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc3 import tables_torch


def test_settings_of_torch_and_ours_do_the_same(on_ranks):
    rows = {row[0]: row[2:] for row in tables_torch.fsdp_settings(2).rows}
    assert rows["FSDP1, `FULL_SHARD`"] == ["0.5", "12", "6", "-"]
    assert rows["FSDP1, `SHARD_GRAD_OP`"] == ["0.5", "6", "6", "-"]
    assert rows["FSDP1, `NO_SHARD`"] == ["1", "-", "-", "6"]
    assert rows["FSDP2, resharded"] == rows["FSDP1, `FULL_SHARD`"]
    assert rows["FSDP2, not resharded"] == rows["FSDP1, `SHARD_GRAD_OP`"]
    assert rows["ours, resharded"] == rows["FSDP2, resharded"]
    assert rows["ours, not resharded"] == rows["FSDP2, not resharded"]


def test_checkpoints_have_every_byte_once(on_ranks, monkeypatch):
    monkeypatch.setattr(tables_torch, "WORLD_SIZES", (2, 3))
    rows = tables_torch.checkpoint_bytes().rows
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert len({row[1] for row in rows}) == 1
    short = [{"state": 1, "rest": 0, "index": 0}]
    monkeypatch.setattr(runs, "remembered", lambda *_: short)
    with pytest.raises(EvidenceError, match="1 ranks wrote 1"):
        tables_torch.checkpoint_bytes()
