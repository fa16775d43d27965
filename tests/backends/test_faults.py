"""A rank dies, stops, leaves, or is in another call: every other rank names it."""

import gc
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.backends.faults import (
    Ranks,
    here,
    named_segments,
    on,
    only_in_a_wait,
    stay,
)
from tests.testing.processes import alive, wait_until
from xtrain.backends.operation import Operation, Steps
from xtrain.backends.peers import Peers
from xtrain.backends.progress import Progress

# What the tests here prove, for their marks.
ESTABLISHED = (
    "xtrain.backends.peers:Peers",
    "xtrain.backends.peers:PeerMonitor",
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.call_runner:CallRunner",
)
FROM_THE_START = (*ESTABLISHED, "xtrain.backends.rendezvous:Rendezvous")

# On a quiet machine a death is noticed within 5 ms; a loaded one may take its time, but
# not the group's timeout.
SOON = 20.0


def reduce_for_ever() -> None:
    tensor = torch.ones(3_000_000)
    while True:
        dist.all_reduce(tensor)


def reduce_in_background() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="rank 1"):
        future.wait()
    assert not work.is_success()
    assert "rank 1" in str(work.exception())
    work.wait()


def receive_from_the_living() -> None:
    """Rank 2 waits for 3, 3 for 0: none but 0 waits for the one that dies."""
    dist.recv(torch.ones(4), {0: 1, 2: 3, 3: 0}[dist.get_rank()])


# What the survivors wait in: the name of the call, and the call.
WAITS = {
    "all_reduce": ("all_reduce", lambda: dist.all_reduce(torch.ones(4))),
    "large_all_reduce": ("all_reduce", reduce_for_ever),
    "recv_from_the_dead": ("recv", lambda: dist.recv(torch.ones(4), 1)),
    "recv_from_the_living": ("recv", receive_from_the_living),
    "recv_from_any": ("recv", lambda: dist.recv(torch.ones(1))),
    "send": ("send", lambda: dist.send(torch.ones(3_000_000), 1)),
    "async": ("all_reduce", reduce_in_background),
}


def waits(say, name: str) -> None:
    if name == "large_all_reduce":  # rank 1 dies in the middle of it
        dist.barrier()
        say("here")
    else:
        here(say)
    WAITS[name][1]()


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.parametrize("name", WAITS)
def test_every_survivor_names_the_dead_rank_and_its_own_call(backend, name):
    with Ranks(backend, 4, waits, name) as ranks:
        ranks.hear()
        if name != "large_all_reduce":  # that one is always in a call
            for rank in ranks.ranks:
                wait_until(rank.sleeps)
        killed = ranks[1].kill()
        for survivor in (0, 2, 3):
            word = ranks[survivor].hear()
            assert word[:2] == ("raised", "PeersLost"), word
            assert re.search(r"^rank 1 (died|is gone)", word[2]), word
            assert f"rank {survivor} waited in {WAITS[name][0]}(" in word[2], word
            assert "test_faults.py:" in word[2], word
            late = ranks[survivor].at - killed
            print(f"{backend} {name} {late * 1e3:.1f} ms")
            assert late < SOON


def computing(say) -> None:
    pids = torch.zeros(3, dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    say("here")
    if on(1):
        stay()
    wait_until(lambda: not alive(int(pids[1])))  # it dies while this rank computes
    say("calls")
    dist.all_reduce(torch.ones(4))


@pytest.mark.verifies(*FROM_THE_START)
def test_a_survivor_that_computes_is_told_at_its_next_call(backend):
    with Ranks(backend, 3, computing) as ranks:
        ranks.hear()
        ranks[1].kill()
        for survivor in (0, 2):
            assert ranks[survivor].hear() == "calls"
            called = ranks[survivor].at
            assert ranks[survivor].hear()[2].startswith("rank 1 died")
            assert ranks[survivor].at - called < SOON


def broken_group(say) -> None:
    in_all = dist.new_group()
    pair = dist.new_group([0, 2])
    here(say)
    # A connection may end a moment before its process does.
    with pytest.raises(RuntimeError, match=r"^rank 1 (died|is gone)"):
        dist.all_reduce(torch.ones(1), group=in_all)
    with pytest.raises(RuntimeError, match=r"broken.*rank 1 (died|is gone)"):
        dist.all_reduce(torch.ones(1), group=in_all)
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)  # rank 1 was not in it
    assert total.item() == 2
    dist.destroy_process_group()


@pytest.mark.verifies(*FROM_THE_START)
def test_a_broken_group_stays_broken_and_the_others_live_on(backend):
    with Ranks(backend, 3, broken_group) as ranks:
        ranks.hear()
        ranks[1].kill()
        for survivor in (0, 2):
            assert ranks[survivor].hear() == ("ended", None)


# --------------------------------------------------------------------- stopped and left


@pytest.mark.verifies(*FROM_THE_START)
def test_a_stopped_rank_is_named_when_the_time_is_up(backend):
    with Ranks(backend, 3, waits, "all_reduce", timeout=3.0) as ranks:
        ranks.hear()
        ranks[1].kill(signal.SIGSTOP)
        for waiting in (0, 2):
            word = ranks[waiting].hear()
            assert "timed out" in word[2], word
            assert f"rank {waiting} waited in all_reduce(" in word[2], word
            assert "not there: rank 1 (stopped)" in word[2], word


def in_recv_in_vain(say) -> None:
    dist.barrier()
    say("here")
    if on(0):
        dist.recv(torch.ones(4), 2)
    else:
        stay()


@pytest.mark.verifies(*FROM_THE_START)
def test_a_message_that_never_comes_names_the_sender(backend):
    with Ranks(backend, 3, in_recv_in_vain, timeout=3.0) as ranks:
        ranks.hear()
        word = ranks[0].hear()
        assert "nothing came from: rank 2 (" in word[2], word


def leaves(say, call: str, how: str) -> None:
    """Rank 1 destroys its group, or its process ends in good order."""
    dist.barrier()
    if on(1):
        if how == "exits":
            raise SystemExit(0)
        dist.destroy_process_group()
    elif call == "all_reduce":
        dist.all_reduce(torch.ones(4))
    else:
        dist.recv(torch.ones(4), 1)


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.parametrize(
    ("call", "how"),
    [("all_reduce", "destroys"), ("recv", "destroys"), ("all_reduce", "exits")],
)
def test_a_rank_that_leaves_is_named(backend, call, how):
    with Ranks(backend, 3, leaves, call, how, linger=how != "exits") as ranks:
        if how == "destroys":
            assert ranks[1].hear() == ("ended", None)
        for waiting in (0, 2):
            word = ranks[waiting].hear()
            assert word[2].startswith("rank 1 left the group while"), word
            assert f"rank {waiting} waited in {call}(" in word[2], word


def last_words(say, left: Path) -> None:
    """What a rank sent before it left or ended arrives; and it was in the last call."""
    rank = dist.get_rank()
    if rank == 1:
        dist.send(torch.full((20_000,), 5.0), 0)
        dist.send(torch.ones(1), 2)
    dist.all_reduce(torch.ones(300_000))
    if rank == 1:
        dist.destroy_process_group()
        left.touch()
        return
    wait_until(left.exists)
    big, small = torch.empty(20_000), torch.empty(1)
    dist.recv(big if rank == 0 else small, 1)
    assert rank == 2 or big.eq(5).all()
    with pytest.raises(RuntimeError, match="rank 1 left"):
        dist.recv(small, 1)


@pytest.mark.verifies(*FROM_THE_START)
def test_what_was_sent_before_leaving_arrives(backend, tmp_path):
    with Ranks(backend, 3, last_words, tmp_path / "left") as ranks:
        assert set(ranks.hear()) == {("ended", None)}


# ----------------------------------------------------------------- the end of a group


def ones_on_the_wire() -> None:
    """What lies on a connection in the middle of a call is data."""
    transport, other = dist.group.WORLD._transport, 1 - dist.get_rank()
    ones = memoryview(bytearray(b"\xff" * 24))
    assert transport.collective[other].write(ones) == 24
    transport.in_call = True  # or a slow message has the waiting rank look for it
    request = dist.irecv(torch.empty(1), other)
    dist.send(torch.ones(1), other)
    request.wait()
    assert transport.left() == []
    transport.in_call = False
    assert transport.left() == [other]  # between two calls it would be a LEAVE
    assert transport.collective[other].read(ones) == 24
    transport._left.clear()
    dist.barrier()


@pytest.mark.verifies(
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.call_runner:CallRunner",
)
def test_a_leave_is_looked_for_between_calls_only(worlds_of):
    worlds_of("xtrain-socket").get(2).run(ones_on_the_wire)


@pytest.mark.verifies("xtrain.backends.progress:Progress")
def test_what_a_peer_did_before_it_went_may_be_enough():
    """The check finds it gone; meanwhile all it owed has arrived."""
    arrived = []

    def check(operation: Operation) -> None:
        arrived.append(True)
        raise RuntimeError("gone")

    def steps() -> Steps:
        while not arrived:
            yield

    progress = Progress(check)
    operation = Operation("recv", steps())
    progress.post("recv", operation)
    progress.wait(operation)
    assert arrived == [True]
    progress.close(RuntimeError("closed"))


def bytes_that_look_like_a_leave() -> None:
    """Data of one bits is what a leaving rank sends first."""
    for _ in range(20):
        minus = torch.full((60_000,), -1, dtype=torch.int64)
        work = dist.all_reduce(minus, dist.ReduceOp.BAND, async_op=True)
        left = (dist.get_rank() - 1) % dist.get_world_size()
        request = dist.irecv(torch.empty(1), left)
        dist.send(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size())
        request.wait()
        work.wait()
        assert minus.eq(-1).all()


@pytest.mark.verifies(*ESTABLISHED)
def test_no_data_is_taken_for_a_leave(ours):
    ours(4).run(bytes_that_look_like_a_leave)


# ---------------------------------------------------------------------- leaving nothing


def traces() -> tuple[int, list[str], int]:
    """Threads, descriptors by what they lead to, shared mappings."""
    gc.collect()
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if re.match(r"socket:|.*memfd:xtrain|.*pidfd", link):
            links.append(link)
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:xtrain" in line for line in maps)
    return threading.active_count(), sorted(links), mapped


def come_and_go(say, enter, rank: int) -> None:
    before = traces()
    enter()
    size = dist.get_world_size()
    extra = dist.new_group()
    dist.all_reduce(torch.ones(1_000_000))
    received = torch.empty(400_000)
    request = dist.irecv(received, (rank - 1) % size)
    send = dist.isend(torch.ones(400_000), (rank + 1) % size)
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True, group=extra)
    for handle in (request, send, work):
        handle.wait()
    never = dist.irecv(received, (rank - 1) % size)
    dist.barrier()
    during = traces()
    assert during != before and during[0] > before[0]
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"destroyed|left"):
        never.wait()
    del request, send, work, handle, never, extra
    say((before, traces()))


@pytest.mark.verifies(*FROM_THE_START)
def test_destroying_a_group_leaves_nothing(backend):
    with Ranks(backend, 3, come_and_go, join=False) as ranks:
        for rank in ranks.ranks:
            word = rank.hear()
            assert word[0] != "raised", word[2]
            before, after = word
            assert after == before
    assert not named_segments()


def unix_names() -> dict[str, str]:
    """Our names among the host's Unix sockets, by inode."""
    with open("/proc/net/unix") as table:
        fields = [line.split() for line in table if "@xtrain-" in line]
    return {words[6]: words[7] for words in fields}


def sockets_of(pid: int) -> set[str]:
    links = (os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd"))
    return {link[8:-1] for link in links if link.startswith("socket:")}


@pytest.mark.verifies(*FROM_THE_START)
def test_killed_ranks_leave_nothing(backend):
    with Ranks(backend, 3, waits, "all_reduce") as ranks:
        ranks.hear()
        names = unix_names()
        inodes = set().union(*(sockets_of(r.process.pid) for r in ranks.ranks))
        theirs = {names[inode] for inode in inodes & names.keys()}
        assert bool(theirs) == (backend == "xtrain-socket")
        for rank in ranks.ranks:
            rank.kill()
            rank.process.join()
    assert not theirs & {*unix_names().values()}
    assert not named_segments()


# ------------------------------------------------------------------------- small parts


@pytest.mark.verifies("xtrain.backends.peers:Peers")
@pytest.mark.parametrize("has_pidfd", [True, False])
def test_peers_are_watched_with_and_without_pidfd(monkeypatch, has_pidfd):
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    child = subprocess.Popen(["sleep", "60"])
    peers = Peers()
    peers.watch(3, child.pid)
    peers.watch(5, os.getpid())
    assert peers.dead() == []
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: peers.state(3) == "stopped")
    assert peers.dead() == []
    child.kill()
    wait_until(lambda: peers.dead() == [3])  # also while nobody has reaped it
    child.wait()
    assert peers.dead() == [3]
    assert peers.state(4) == "unknown"
    peers.close()
    assert peers.dead() == []


def summed(say=None) -> float:
    if say is not None:
        say("here")
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def interrupted(say) -> None:
    """Ctrl-C while it waits: raised at once, and the group is left in good order."""
    signal.signal(signal.SIGINT, only_in_a_wait(signal.default_int_handler))
    dist.barrier()
    if on(0):
        with pytest.raises(KeyboardInterrupt):
            summed(say)
        say("interrupted")
    else:
        say("here")
        wait_until(Path(os.environ["INTERRUPTED"]).exists)
        assert summed() == 2  # what rank 0 had given is there


@pytest.mark.verifies(*FROM_THE_START)
def test_ctrl_c_interrupts_a_wait(backend, tmp_path):
    done = tmp_path / "interrupted"
    environment = {"INTERRUPTED": str(done)}
    with Ranks(backend, 2, interrupted, environment=environment) as ranks:
        ranks.hear()
        ranks[0].kill(signal.SIGINT)
        assert ranks[0].hear() == "interrupted"
        done.touch()
        assert set(ranks.hear()) == {("ended", None)}
