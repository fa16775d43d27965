"""Other load is what all processes used, less what the ranks used."""

import os
import socket
import time

import pytest

from xtrain.bench import machine

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/stat"), reason="only Linux tells how busy it is"
)


def test_busy_time_grows_by_at_least_what_this_process_used():
    clock = machine.BusyClock()
    assert clock.known
    busy, cpu = clock.read(), time.process_time()
    while time.process_time() < cpu + 0.3:
        pass
    used = time.process_time() - cpu
    # Ticks are sampled, so the plain count may miss a few of them.
    assert clock.read() - busy > used - 10 * clock.resolution - 0.01


def test_ticks_alone_serve_when_there_is_no_exact_account(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    # user nice system idle iowait irq softirq steal: 1000 + 0 + 500 ticks, 50 stolen
    stat.write_text("cpu  1000 0 500 9000 10 0 5 50 0 0\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(machine, "_STAT", stat)
    monkeypatch.setattr(machine, "_ACCOUNT", tmp_path / "missing")
    clock = machine.BusyClock()
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert clock.resolution == tick
    assert clock.read() == pytest.approx(1550 * tick)


def test_an_account_of_this_container_alone_is_not_trusted(monkeypatch, tmp_path):
    stat, account = tmp_path / "stat", tmp_path / "usage"
    stat.write_text("cpu  100000 0 50000 9000 10 0 5 0 0 0\n")
    monkeypatch.setattr(machine, "_STAT", stat)
    monkeypatch.setattr(machine, "_PROCESSES", tmp_path)
    monkeypatch.setattr(machine, "_ACCOUNT", account)
    account.write_text("1000000000\n")  # one second, of 1500
    assert machine.BusyClock().resolution > 0
    account.write_text("1503000000000\n")
    clock = machine.BusyClock()
    assert clock.resolution == 0
    assert clock.read() == pytest.approx(1503.0)


def test_what_the_kernel_carries_for_the_ranks_is_no_other_load(monkeypatch, tmp_path):
    stat, account = tmp_path / "stat", tmp_path / "usage"
    stat.write_text("cpu  100000 0 50000 9000 10 0 5 0 0 0\n")
    account.write_text("1503000000000\n")
    for pid, name, nanoseconds in ((14, "ksoftirqd/0", 2e9), (15, "kswapd0", 7e9)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
        (tmp_path / str(pid) / "schedstat").write_text(f"{nanoseconds:.0f} 5 9\n")
    monkeypatch.setattr(machine, "_PROCESSES", tmp_path)
    monkeypatch.setattr(machine, "_STAT", stat)
    monkeypatch.setattr(machine, "_ACCOUNT", account)
    assert machine.BusyClock().read() == pytest.approx(1501.0)


def test_a_system_that_does_not_tell_is_not_guessed(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_STAT", tmp_path / "missing")
    clock = machine.BusyClock()
    assert not clock.known
    assert clock.read() == 0.0


def test_the_description_names_no_host():
    described = machine.describe()
    assert described["cores"] == os.cpu_count()
    assert described["cpu"]
    assert described["memory_bytes"] > 2**28
    assert socket.gethostname() not in str(described)
    assert set(machine.versions()) == {"python", "torch", "xtrain"}


def test_the_facts_of_a_machine_are_measured():
    facts = machine.facts()
    assert 1e-7 < facts["wake_seconds"] < 1
    assert 1e7 < facts["copy_bytes_per_second"] < 1e13
