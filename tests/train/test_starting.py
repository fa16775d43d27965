"""A store that answers no more: every rank of a start ends, and tells where it was."""

import os
import re
import signal
import socket
import time

import pytest

from tests.faults import runner
from tests.faults.test_processes import LAYOUTS, NOBODY, names_its_place, recipe
from xtrain.comm.flight_recorder_files import read_dumps
from xtrain.train import starting, stopping
from xtrain.train.phases import Place
from xtrain.train.starting import Starting


def mute(port, node):
    """In place of the store: it takes connections, and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port.send(server.getsockname()[1])
        time.sleep(600.0)


@pytest.mark.processes("faults are of processes")
def test_ranks_that_cannot_meet_end_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(starting, "MARGIN", 1.0)
    monkeypatch.setattr(runner, "serve_store", mute)
    made = recipe("data", tmp_path, LAYOUTS["data"], timeout=2.0)
    for rank, end in enumerate(runner.run_ranks(made, 2, NOBODY, tmp_path)):
        call = r"init_process_group \(train/processes.py:\d+\)"
        told = rf"^rank {rank}, start, in {call}: no answer in \d+ s$"
        assert end.code == 1 and re.search(told, end.output, re.MULTILINE), end


@pytest.mark.processes("faults are of processes")
def test_ranks_that_cannot_make_their_groups_end_in_time(tmp_path, monkeypatch):
    serve, store = runner.serve_store, tmp_path / "store"

    def serve_and_tell(port, node):
        store.write_text(str(os.getpid()))
        serve(port, node)

    def stop():
        os.kill(int(store.read_text()), signal.SIGSTOP)
        time.sleep(0.5)  # until it has stopped

    monkeypatch.setattr(starting, "MARGIN", 1.0)
    monkeypatch.setattr(runner, "serve_store", serve_and_tell)
    monkeypatch.setitem(runner.FAULTS, "SIGSTOP of the store", stop)
    made = recipe("data", tmp_path, LAYOUTS["data"], timeout=4.0)
    fault = 1, "SIGSTOP of the store", "start", 0
    ends = runner.run_ranks(made, 2, fault, tmp_path)
    for rank, end in enumerate(ends):  # rank 0 may be one call further
        assert end.code == 1 and names_its_place(end, rank, 0, 1), end
    assert "group mesh_pipeline: no answer in" in ends[1].output
    reason = next(d for d in read_dumps([tmp_path / "calls"]) if d.rank == 1).reason
    assert "no answer" in reason


@pytest.mark.verifies("xtrain.train.starting:Starting")
def test_a_start_may_take_long_outside_of_calls(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(starting, "MARGIN", 0.0)
    monkeypatch.setattr(stopping.os, "_exit", ended.append)
    with Starting(Place(), 0.1):
        time.sleep(1.0)
    assert ended == []
