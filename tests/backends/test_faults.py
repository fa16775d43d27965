"""A rank dies, stops, leaves, or stands in another call: everybody is told whose."""

import contextlib
import inspect
import logging
import logging.handlers
import os
import re
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from typing_extensions import deprecated

from tests.backends.faults import Ranks, only_in_a_wait, stay
from tests.testing.processes import alive, wait_until
from xtrain.backends import rendezvous
from xtrain.backends.calls import BETWEEN, KINDS, NOWHERE, PROGRAM, CollectiveCall
from xtrain.backends.operation import Operation, Steps
from xtrain.backends.peers import Peers
from xtrain.backends.progress import Progress
from xtrain.backends.rendezvous import Rendezvous, host_key
from xtrain.backends.swaps import MAX_CALLS, SwapDetector

# What the tests here prove, for their marks.
FROM_THE_START = (
    "xtrain.backends.peers:Peers",
    "xtrain.backends.peers:PeerMonitor",
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.rendezvous:Rendezvous",
    "xtrain.backends.call_runner:CallRunner",
)
ESTABLISHED = (
    "xtrain.backends.peers:Peers",
    "xtrain.backends.peers:PeerMonitor",
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.call_runner:CallRunner",
)
FORMING = (
    "xtrain.backends.peers:Peers",
    "xtrain.backends.rendezvous:Rendezvous",
)

# On a quiet machine a death is noticed within 5 ms; a loaded one may take its time, but
# not the group's timeout.
SOON = 20.0


def in_all_reduce(say) -> None:
    dist.barrier()
    say("here")
    if dist.get_rank() == 1:
        stay()
    dist.all_reduce(torch.ones(4))


def in_large_all_reduce(say) -> None:
    tensor = torch.ones(3_000_000)
    dist.barrier()
    say("here")
    while True:
        dist.all_reduce(tensor)


def in_recv_from_the_dead(say) -> None:
    dist.barrier()
    say("here")
    if dist.get_rank() == 1:
        stay()
    dist.recv(torch.ones(4), 1)


def in_recv_from_the_living(say) -> None:
    """Rank 2 waits for 3, 3 for 0: nobody waits for the one that dies but 0."""
    dist.barrier()
    say("here")
    if dist.get_rank() == 1:
        stay()
    dist.recv(torch.ones(4), {0: 1, 2: 3, 3: 0}[dist.get_rank()])


def in_send(say) -> None:
    dist.barrier()
    say("here")
    if dist.get_rank() == 1:
        stay()
    dist.send(torch.ones(3_000_000), 1)


def in_async(say) -> None:
    dist.barrier()
    say("here")
    if dist.get_rank() == 1:
        stay()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="rank 1"):
        future.wait()
    assert not work.is_success()
    assert "rank 1" in str(work.exception())
    work.wait()


def in_broadcast_from_any(say) -> None:
    dist.barrier()
    say("here")
    if dist.get_rank() == 1:
        stay()
    dist.recv(torch.ones(1))


PHASES = {
    in_all_reduce: "all_reduce",
    in_large_all_reduce: "all_reduce",
    in_recv_from_the_dead: "recv",
    in_recv_from_the_living: "recv",
    in_broadcast_from_any: "recv",
    in_send: "send",
    in_async: "all_reduce",
}


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_every_survivor_names_the_dead_rank_and_its_own_call(backend, phase):
    with Ranks(backend, 4, phase) as ranks:
        for rank in ranks.ranks:
            rank.hear()
        if phase is not in_large_all_reduce:  # that one is always in a call
            for rank in ranks.ranks:
                wait_until(rank.sleeps)
        killed = ranks[1].kill()
        for survivor in (0, 2, 3):
            word = ranks[survivor].hear()
            assert word[:2] == ("raised", "PeersLost"), word
            assert re.search(r"^rank 1 (died|is gone)", word[2]), word
            assert f"rank {survivor} waited in {PHASES[phase]}(" in word[2], word
            assert "test_faults.py:" in word[2], word
            late = ranks[survivor].at - killed
            print(f"{backend} {phase.__name__} {late * 1e3:.1f} ms")
            assert late < SOON


def computing(say) -> None:
    pids = torch.zeros(3, dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    say("here")
    if dist.get_rank() == 1:
        stay()
    wait_until(lambda: not alive(int(pids[1])))  # it dies while this rank computes
    say("calls")
    dist.all_reduce(torch.ones(4))


@pytest.mark.verifies(*FROM_THE_START)
def test_a_survivor_that_computes_is_told_at_its_next_call(backend):
    with Ranks(backend, 3, computing) as ranks:
        for rank in ranks.ranks:
            rank.hear()
        ranks[1].kill()
        for survivor in (0, 2):
            assert ranks[survivor].hear() == "calls"
            called = ranks[survivor].at
            assert ranks[survivor].hear()[2].startswith("rank 1 died")
            assert ranks[survivor].at - called < SOON


def broken_group(say) -> None:
    in_all = dist.new_group()
    pair = dist.new_group([0, 2])
    dist.barrier()
    say("here")
    if dist.get_rank() == 1:
        stay()
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
        for rank in ranks.ranks:
            rank.hear()
        ranks[1].kill()
        for survivor in (0, 2):
            assert ranks[survivor].hear() == ("ended", None)


def forming(say, enter, rank: int) -> None:
    say("here")
    if rank == 3:
        stay()
    enter()


@pytest.mark.verifies(*FORMING, "xtrain.backends.call_runner:CallRunner")
def test_a_rank_that_dies_while_the_group_forms_is_named(backend):
    """Rank 3 never comes, so the others are all still forming when rank 1 dies."""
    key = "shm/1" if backend == "xtrain-shm" else "socket/1"
    with Ranks(backend, 4, forming, join=False) as ranks:
        for rank in ranks.ranks:
            rank.hear()
        wait_until(lambda: key.encode() in ranks.store.read_bytes())
        killed = ranks[1].kill()
        for survivor in (0, 2):
            word = ranks[survivor].hear()
            assert word[0] == "raised", word
            assert "rank 1 died while the group was being formed" in word[2], word
            assert ranks[survivor].at - killed < SOON


@pytest.mark.verifies(*FORMING, "xtrain.backends.call_runner:CallRunner")
def test_a_rank_that_never_comes_is_named(backend):
    with Ranks(backend, 4, forming, join=False, timeout=3.0) as ranks:
        for rank in ranks.ranks:
            rank.hear()
        for present in (0, 1, 2):
            word = ranks[present].hear()
            assert "not complete within 3 s" in word[2], word
            assert "ranks [3]" in word[2], word


def stuck_after_rendezvous(say, enter, rank: int) -> None:
    """Rank 0 has told where it is, read where the others are, and does nothing more."""
    if rank == 0:
        exchange = Rendezvous.exchange_addresses

        def sleep(self, endpoint):
            exchange(self, endpoint)
            say("here")
            stay()

        Rendezvous.exchange_addresses = sleep
    enter()


@pytest.mark.verifies(*FORMING, "xtrain.backends.call_runner:CallRunner")
def test_a_rank_that_dies_while_the_others_connect_is_named(backend):
    with Ranks(backend, 3, stuck_after_rendezvous, join=False, timeout=300.0) as ranks:
        ranks[0].hear()
        ranks[0].kill()
        for survivor in (1, 2):
            word = ranks[survivor].hear()
            assert "rank 0 died while the group was being formed" in word[2], word


@pytest.mark.verifies(*FORMING, "xtrain.backends.call_runner:CallRunner")
def test_the_timeout_limits_connecting_too(backend):
    with Ranks(backend, 3, stuck_after_rendezvous, join=False, timeout=2.0) as ranks:
        ranks[0].hear()
        for waiting in (1, 2):
            word = ranks[waiting].hear()
            assert "the group was not complete within 2 s: " in word[2], word
            assert "ranks [0]" in word[2], word


def late_to_a_new_group(say) -> None:
    if dist.get_rank() == 1:
        wait_until(Path(os.environ["LATE"]).exists, 60)
    dist.new_group(timeout=timedelta(seconds=1))


@pytest.mark.verifies(
    *FORMING,
    "xtrain.backends.progress:Progress",
    "xtrain.backends.call_runner:CallRunner",
    "xtrain.backends.peers:PeerMonitor",
)
def test_a_rank_that_comes_late_is_told_who_gave_up_and_why(backend, tmp_path):
    sign = tmp_path / "late"
    environment = {"LATE": str(sign)}
    with Ranks(backend, 2, late_to_a_new_group, environment=environment) as ranks:
        why = "the group was not complete within 1 s: nothing was heard from ranks [1]"
        assert ranks[0].hear()[2] == why
        sign.touch()
        assert ranks[1].hear()[2] == f"rank 0 gave up this group: {why}"


def test_a_new_groups_timeout_limits_its_forming_on_gloo_as_well(tmp_path):
    """Its default group would wait 300 s; over a file gloo counts in whole seconds."""
    environment = {"LATE": str(tmp_path / "never")}
    with Ranks(
        "gloo", 2, late_to_a_new_group, environment=environment, timeout=300.0
    ) as ranks:
        assert ranks[0].hear()[:2] == ("raised", "RuntimeError")


@pytest.mark.verifies(*FORMING)
def test_a_rank_that_gave_up_may_come_again(monkeypatch):
    """Others that find its old line wait for a new one, for a while."""
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 20.0)
    store, met = dist.HashStore(), {}
    with pytest.raises(RuntimeError, match="not complete within 0.1 s"):
        rendezvous_in(store, 0, 0.1, met)
    other = threading.Thread(target=rendezvous_in, args=(store, 1, 20.0, met))
    other.start()
    wait_until(lambda: store.check(["socket/1"]))
    rendezvous_in(store, 0, 20.0, met)
    other.join()
    assert met[0] == met[1]


@pytest.mark.verifies(*FORMING)
@pytest.mark.parametrize("peer", [0, 2])
def test_a_rank_that_begins_anew_is_noticed(peer):
    """Whoever has read its first line waits in vain for what that line led to."""
    store, peers = dist.HashStore(), Peers()
    line = f"{host_key()} {os.getpid()} {{}} unix:y"
    for other in (0, 2):
        store.set(f"socket/{other}", line.format("0" * 32))
    forming = Rendezvous(store, "socket", 1, 3, 20.0, peers)
    forming.exchange_addresses("unix:x")
    looks = iter(range(1000))

    def ready() -> bool:
        if next(looks) == 3:
            store.set(f"socket/{peer}", line.format("1" * 32))
        return False

    with pytest.raises(RuntimeError, match=f"rank {peer} began anew"):
        forming.wait_until(ready, lambda: "no reason")
    peers.close()


@pytest.mark.verifies(*FORMING)
def test_a_reason_is_passed_on_as_it_is_but_cut_and_in_plain_characters(monkeypatch):
    """It comes from the store, where anybody may write."""
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.0)
    store = dist.HashStore()
    store.set("socket/0", "gave-up rank 0 gave up this group: \x1b[2J\n" + 5000 * "x")
    told = "rank 0 gave up this group: ?[2J?" + "x" * 468
    for rank in (1, 2):
        with pytest.raises(RuntimeError) as raised:
            rendezvous_in(store, rank, 20.0, {})
        assert str(raised.value) == told
        assert store.get(f"socket/{rank}").decode() == f"gave-up {told}"
        store.set("socket/0", "")


def rendezvous_in(store: dist.Store, rank: int, seconds: float, met: dict) -> None:
    with Rendezvous(store, "socket", rank, 2, seconds, Peers()) as forming:
        met[rank] = forming.exchange_addresses(f"unix:{rank}")
        forming.wait_until(lambda: len(met) == 2, lambda: "the other has not met")


# --------------------------------------------------------------------- stopped and left


@pytest.mark.verifies(*FROM_THE_START)
def test_a_stopped_rank_is_named_when_the_time_is_up(backend):
    with Ranks(backend, 3, in_all_reduce, timeout=3.0) as ranks:
        for rank in ranks.ranks:
            rank.hear()
        ranks[1].kill(signal.SIGSTOP)
        for waiting in (0, 2):
            word = ranks[waiting].hear()
            assert "timed out" in word[2], word
            assert f"rank {waiting} waited in all_reduce(" in word[2], word
            assert "not there: rank 1 (stopped)" in word[2], word


def in_recv_in_vain(say) -> None:
    dist.barrier()
    say("here")
    if dist.get_rank() == 0:
        dist.recv(torch.ones(4), 2)
    else:
        stay()


@pytest.mark.verifies(*FROM_THE_START)
def test_a_message_that_never_comes_names_the_sender(backend):
    with Ranks(backend, 3, in_recv_in_vain, timeout=3.0) as ranks:
        for rank in ranks.ranks:
            rank.hear()
        word = ranks[0].hear()
        assert "nothing came from: rank 2 (" in word[2], word


def leaves(say, call: str) -> None:
    """Rank 1 leaves in good order; an orderly exit counts as leaving too."""
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
    elif call == "all_reduce":
        dist.all_reduce(torch.ones(4))
    else:
        dist.recv(torch.ones(4), 1)


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_a_rank_that_leaves_is_named(backend, call):
    with Ranks(backend, 3, leaves, call) as ranks:
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
        for rank in ranks.ranks:
            assert rank.hear() == ("ended", None)


# ------------------------------------------------------------------------ nine mistakes


def on(rank: int):
    return dist.get_rank() == rank


def other_operation(t):
    dist.broadcast(t, 0) if on(1) else dist.all_reduce(t)


def other_root(t):
    dist.broadcast(t, 1 if on(1) else 0)


def extra_call(t):
    if on(1):
        dist.all_reduce(t)
    dist.all_gather([torch.empty_like(t) for _ in range(dist.get_world_size())], t)


def other_shape(t):
    dist.all_reduce(t[:3] if on(1) else t)


def other_width(t):
    dist.all_reduce(t.double() if on(1) else t)


def other_dtype(t):
    dist.all_reduce(t.view(torch.int32) if on(1) else t)


def other_reduction(t):
    dist.all_reduce(t, dist.ReduceOp.MAX if on(1) else dist.ReduceOp.SUM)


def other_output(t):
    """The same elements: one rank wants them in a row, the others in rows."""
    size = dist.get_world_size()
    dist.all_gather_into_tensor(
        t.new_empty((size * len(t),) if on(1) else (size, len(t))), t
    )


def other_splits(t):
    size = dist.get_world_size()
    sends = [2] * size
    if on(1):
        sends[2] += 1
    source = torch.ones(sum(sends))
    dist.all_to_all_single(torch.empty(2 * size), source, [2] * size, sends)


def other_gather(t):
    into = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.gather(t[:2] if on(1) else t, into if on(0) else None, 0)


MISTAKES = [
    other_operation,
    other_root,
    extra_call,
    other_shape,
    other_width,
    other_dtype,
    other_reduction,
    other_output,
    other_splits,
    other_gather,
]


def make_mistake(mistake, length: int) -> str:
    """The error's text; the data is untouched and the group goes on working."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((length,), float(rank))
    with pytest.raises(RuntimeError) as raised:
        mistake(tensor)
    assert torch.equal(tensor, torch.full((length,), float(rank)))
    for length in (1, 100_000):
        total = torch.full((length,), float(rank))
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((length,), size * (size - 1) / 2))
    return str(raised.value)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
@pytest.mark.parametrize("length", [8, 400_000])
@pytest.mark.verifies(
    *ESTABLISHED, "xtrain.backends.calls:call_site", "xtrain.backends.calls:fingerprint"
)
def test_ranks_in_different_calls_are_all_shown(ours, mistake, length):
    texts = ours(3).run(make_mistake, mistake, length)
    assert len(set(texts)) == 1
    lines = texts[0].splitlines()
    assert "the ranks of this group are in different calls" in lines[0]
    for rank in range(3):
        where = rf"  rank {rank}: \w+\(.*\).* at .*test_faults.py:\d+"
        assert re.fullmatch(where, lines[1 + rank]), lines
    assert lines[1] != lines[2]
    assert "XTRAIN_COMPARE_LINES" not in texts[0]


# ----------------------------------------------------------------- calls that are alike


def in_order(first, second, group) -> None:
    """Two calls, the other way round on rank 1, with one between them."""
    calls = (second, first) if on(1) else (first, second)
    calls[0]()
    dist.all_reduce(torch.ones(1), group=group)
    calls[1]()


def swapped_all_reduce(a, b, group):
    def first():
        dist.all_reduce(a, group=group)

    def second():
        dist.all_reduce(b, group=group)

    in_order(first, second, group)


def swapped_reduce_scatter(a, b, group):
    out = a.new_empty(len(a) // dist.get_world_size())

    def first():
        dist.reduce_scatter_tensor(out, a, group=group)

    def second():
        dist.reduce_scatter_tensor(out, b, group=group)

    in_order(first, second, group)


def swapped_all_gather(a, b, group):
    out = a.new_empty(len(a) * dist.get_world_size())

    def first():
        dist.all_gather_into_tensor(out, a, group=group)

    def second():
        dist.all_gather_into_tensor(out, b, group=group)

    in_order(first, second, group)


def swapped_broadcast(a, b, group):
    def first():
        dist.broadcast(a, 0, group=group)

    def second():
        dist.broadcast(b, 0, group=group)

    in_order(first, second, group)


SYMMETRIC = [swapped_all_reduce, swapped_reduce_scatter, swapped_all_gather]
SWAPS = [*SYMMETRIC, swapped_broadcast]


def new_group(compare_lines: str | None) -> dist.ProcessGroup:
    """A group of all ranks, made with this environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XTRAIN_COMPARE_LINES", raising=False)
        if compare_lines is not None:
            patch.setenv("XTRAIN_COMPARE_LINES", compare_lines)
        return dist.new_group(backend=dist.get_backend())


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the backends log meanwhile."""
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("xtrain.backends").addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logging.getLogger("xtrain.backends").removeHandler(handler)


def lines_of(function) -> list[str]:
    """Where `function` calls torch.distributed: "test_faults.py:12", in order."""
    source, first = inspect.getsourcelines(function)
    numbers = [
        first + i for i, line in enumerate(source) if line.strip().startswith("dist.")
    ]
    return [f"{Path(__file__).name}:{number}" for number in numbers]


def swap_compared(swap, length: int) -> str:
    group = new_group("1")
    a, b = torch.full((length,), 1.0), torch.full((length,), 10.0)
    with pytest.raises(RuntimeError) as raised:
        swap(a, b, group)
    assert bool((a == 1).all()) and bool((b == 10).all())
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    dist.destroy_process_group(group)
    return str(raised.value)


@pytest.mark.parametrize("swap", SYMMETRIC, ids=lambda s: s.__name__)
@pytest.mark.verifies(*FROM_THE_START, "xtrain.backends.calls:call_site")
def test_swapped_calls_are_refused_when_lines_are_compared(ours, swap):
    first, second = lines_of(swap)
    for length in (12, 300_000):
        texts = ours(3).run(swap_compared, swap, length)
        assert len(set(texts)) == 1
        lines = texts[0].splitlines()
        for rank, where in enumerate([first, second, first]):
            assert lines[1 + rank].startswith(f"  rank {rank}: "), lines
            assert lines[1 + rank].endswith(f"/{where}"), lines
        assert "Only their lines differ" in lines[4]


def swap_warned_of(swap, length: int) -> list[str]:
    """What is logged while calls are swapped twice; the group goes on."""
    group = new_group(None)
    with logged() as records:
        for _ in range(2):
            swap(torch.ones(length), torch.ones(length), group)
    dist.destroy_process_group(group)
    return [record.getMessage() for record in records]


@pytest.mark.parametrize("swap", SWAPS, ids=lambda s: s.__name__)
@pytest.mark.verifies(*FROM_THE_START, "xtrain.backends.swaps:SwapDetector")
def test_swapped_calls_are_warned_of_by_every_rank_once_for_each_line(ours, swap):
    lines = lines_of(swap)
    for length in (12, 300_000):
        for rank, told in enumerate(ours(3).run(swap_warned_of, swap, length)):
            assert len(told) == 2, told
            earlier_and_now = re.findall(r"test_faults.py:\d+", told[0])
            assert earlier_and_now == (lines[::-1] if rank == 1 else lines), told
            assert "XTRAIN_COMPARE_LINES=1" in told[0]


def legal_lines(group, length: int) -> None:
    """One call on two lines: ranks that are told apart, and a rooted call."""
    size, x = dist.get_world_size(), torch.ones(length)
    for _ in range(2):
        if on(0):
            dist.all_reduce(x, group=group)
            dist.barrier(group)
            dist.broadcast(x, 0, group=group)
        else:
            dist.all_reduce(x, group=group)
            dist.barrier(group)
            dist.broadcast(x, 0, group=group)
    assert bool((x == size * size).all())
    for root in range(size):  # every rank comes to both lines, but with its own root
        if on(root):
            dist.broadcast(x, root, group=group)
        else:
            dist.broadcast(x, root, group=group)


def lines_may_differ(compare_lines: str | None) -> list[str]:
    group = new_group(compare_lines)
    with logged() as records:
        for length in (1, 300_000):
            legal_lines(group, length)
    dist.destroy_process_group(group)
    return [record.getMessage() for record in records]


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.parametrize("compare_lines", [None, "0"])
def test_ranks_may_make_one_call_from_different_lines(ours, compare_lines):
    assert ours(3).run(lines_may_differ, compare_lines) == [[], [], []]


def takes_turns() -> list[str]:
    """Right, though it looks like a swap: one rank after the other gives its tensor."""
    group, size = new_group(None), dist.get_world_size()
    with logged() as records:
        for turn in range(size):
            mine, nothing = torch.full((2,), turn + 1.0), torch.zeros(2)
            if on(turn):
                dist.all_reduce(mine, group=group)
            else:
                dist.all_reduce(nothing, group=group)
            assert (mine if on(turn) else nothing).tolist() == [turn + 1, turn + 1]
    dist.destroy_process_group(group)
    return [record.getMessage() for record in records]


@pytest.mark.verifies(*FROM_THE_START)
def test_ranks_that_take_turns_on_two_lines_are_warned_and_served(ours):
    for told in ours(3).run(takes_turns):
        assert told and all("Are these calls swapped?" in each for each in told)


@pytest.mark.verifies("xtrain.backends.swaps:SwapDetector")
def test_a_program_of_ever_new_calls_from_two_lines_fills_no_memory():
    swaps, call = (
        SwapDetector(0),
        CollectiveCall("all_reduce", None, None, None, NOWHERE),
    )
    for number in range(3 * MAX_CALLS):
        swaps.note(call, [2 * number, 2 * number + 1])
    assert len(swaps._mine) <= MAX_CALLS


def lines_that_are_never_compared() -> None:
    group, x = new_group("1"), torch.ones(2)
    if on(0):
        dist.barrier(group)
        dist.broadcast(x, 0, group=group)
        y = differentiable.all_reduce(x, group=group)
    else:
        dist.barrier(group)
        dist.broadcast(x, 0, group=group)
        y = differentiable.all_reduce(x, group=group)
    assert y.tolist() == [3, 3]
    dist.destroy_process_group(group)


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.filterwarnings("ignore")
def test_calls_with_a_root_barriers_and_those_of_libraries_have_no_line_to_compare(
    ours,
):
    ours(3).run(lines_that_are_never_compared)


def compared_by_one_rank() -> str:
    group = new_group("1" if on(1) else None)
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    return str(raised.value)


@pytest.mark.verifies(*FROM_THE_START)
def test_a_setting_that_only_some_ranks_have_is_named(ours):
    for text in ours(2).run(compared_by_one_rank):
        assert "Is XTRAIN_COMPARE_LINES set on some ranks only?" in text


def swapped_in_a_loop(a, b, group) -> None:
    """Two orders on one line."""
    for tensor in (b, a) if on(1) else (a, b):
        dist.all_reduce(tensor, group=group)


def swapped_on_lines_of_its_own(a, b, group) -> None:
    """Written like calls that belong together."""
    if on(1):
        dist.all_reduce(b, group=group)
        dist.all_reduce(a, group=group)
    else:
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)


def swapped_unnoticed(swap, compare_lines: str | None) -> tuple[float, float]:
    group = new_group(compare_lines)
    a, b = torch.tensor([1.0]), torch.tensor([10.0])
    with logged() as records:
        swap(a, b, group)
    dist.destroy_process_group(group)
    assert records == []
    return a.item(), b.item()


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.parametrize(
    ("swap", "compare_lines"),
    [
        (swapped_in_a_loop, None),
        (swapped_in_a_loop, "1"),
        (swapped_on_lines_of_its_own, None),
    ],
)
def test_some_swapped_calls_cannot_be_told_from_right_ones(ours, swap, compare_lines):
    """The page says so; when one of them can be caught, it may say better."""
    wrong = (1.0 + 10.0 + 1.0, 10.0 + 1.0 + 10.0)
    sums = ours(3).run(swapped_unnoticed, swap, compare_lines)
    assert sums == [wrong, wrong[::-1], wrong]


@pytest.mark.verifies(*FROM_THE_START, "xtrain.backends.calls:call_site")
def test_what_is_swapped_on_lines_of_its_own_is_refused_when_lines_are_compared(ours):
    swap = swapped_on_lines_of_its_own
    b_first, _, a_first, _ = lines_of(swap)
    for text in ours(3).run(swap_compared, swap, 12):
        assert text.count(f"/{a_first}") == 2 and text.count(f"/{b_first}") == 1


def through_deprecated() -> list[str]:
    """By `typing_extensions`, as torch 2.13 wraps; Python 3.13 has a wrapper, too."""
    texts = []
    for wrap in (deprecated, getattr(warnings, "deprecated", deprecated)):
        all_reduce = wrap("in tests")(dist.all_reduce)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError) as raised:
                all_reduce(torch.ones(2 if on(1) else 3))
        texts.append(str(raised.value))
    return texts


@pytest.mark.verifies(
    "xtrain.backends.calls:call_site",
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.call_runner:CallRunner",
)
def test_what_wraps_a_deprecated_function_is_not_taken_for_the_line(ours):
    for text in ours(2).run(through_deprecated)[0]:
        assert text.count("/test_faults.py:") == 2, text
    for module in ("typing_extensions", "warnings"):
        assert KINDS[module] == BETWEEN
    for module in (
        "warnings_of_mine",
        "typing_extensions_too",
        "torchlike",
        "__main__",
    ):
        assert KINDS[module] == PROGRAM


def wrong_message(take: torch.dtype, count: int) -> str:
    rank = dist.get_rank()
    landing = torch.full((count,), 7).to(take)
    before = landing.clone()
    text = ""
    if rank == 0:
        dist.send(torch.ones(4), 1)
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        with pytest.raises(RuntimeError) as raised:
            dist.recv(landing, 0)
        text = str(raised.value)
        assert torch.equal(landing, before)
        after = torch.zeros(2)
        dist.recv(after, 0)
        assert after.tolist() == [1, 1]
    dist.barrier()
    return text


@pytest.mark.parametrize(
    ("take", "count"), [(torch.float32, 3), (torch.float32, 5), (torch.int32, 4)]
)
@pytest.mark.verifies(*ESTABLISHED, "xtrain.backends.messages:Inbox")
def test_a_message_of_another_size_is_refused_by_its_receiver(ours, take, count):
    """The ninth class: nothing is written, the next message arrives."""
    _, text, _ = ours(3).run(wrong_message, take, count)
    assert re.search(r"rank 0 sent 16 bytes of float32 at .*test_faults.py:\d+", text)
    assert re.search(r"recv\(\[\d\] \w+, src=\[0\]\) at .*test_faults.py:\d+", text)


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
    assert transport.left() == [other]  # between two calls it would be a goodbye
    assert transport.collective[other].read(ones) == 24
    transport._left.clear()
    dist.barrier()


@pytest.mark.verifies(
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.call_runner:CallRunner",
)
def test_a_goodbye_is_looked_for_between_calls_only(worlds_of):
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


def bytes_that_look_like_a_goodbye() -> None:
    """Data of ones bits is what a leaving rank says first."""
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
def test_no_data_is_taken_for_a_goodbye(ours):
    ours(4).run(bytes_that_look_like_a_goodbye)


# ---------------------------------------------------------------------- leaving nothing


def traces() -> tuple[int, list[str], int]:
    """Threads, descriptors by what they lead to, shared mappings."""
    import gc
    import threading

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
    landing = torch.empty(400_000)
    request = dist.irecv(landing, (rank - 1) % size)
    send = dist.isend(torch.ones(400_000), (rank + 1) % size)
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True, group=extra)
    for handle in (request, send, work):
        handle.wait()
    never = dist.irecv(landing, (rank - 1) % size)
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
    assert not [name for name in os.listdir("/dev/shm") if "xtrain" in name]


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
    with Ranks(backend, 3, in_all_reduce) as ranks:
        for rank in ranks.ranks:
            rank.hear()
        names = unix_names()
        inodes = set().union(*(sockets_of(r.process.pid) for r in ranks.ranks))
        theirs = {names[inode] for inode in inodes & names.keys()}
        assert bool(theirs) == (backend == "xtrain-socket")
        for rank in ranks.ranks:
            rank.kill()
            rank.process.join()
    assert not theirs & {*unix_names().values()}
    assert not [name for name in os.listdir("/dev/shm") if "xtrain" in name]


# ------------------------------------------------------------------------- small parts


def waits_a_little() -> None:
    rank = dist.get_rank()
    if rank == 0:
        landing = torch.zeros(1)
        work = dist.irecv(landing, 1)
        with pytest.raises(RuntimeError, match=r"not done after 0.05 s: recv\("):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
    dist.barrier()
    if rank == 0:
        work.wait()
        assert landing.item() == 1
    else:
        dist.send(torch.ones(1), 0)


@pytest.mark.verifies(*ESTABLISHED)
def test_a_short_wait_ends_and_the_operation_goes_on(ours):
    ours(2).run(waits_a_little)


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
    if dist.get_rank() == 0:
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
        for rank in ranks.ranks:
            rank.hear()
        ranks[0].kill(signal.SIGINT)
        assert ranks[0].hear() == "interrupted"
        done.touch()
        for rank in ranks.ranks:
            assert rank.hear() == ("ended", None)


def exits(say) -> None:
    """A process that ends without destroying its group has left, not died."""
    dist.barrier()
    if dist.get_rank() == 1:
        raise SystemExit(0)
    dist.all_reduce(torch.ones(1))


@pytest.mark.verifies(*FROM_THE_START)
def test_an_orderly_exit_counts_as_leaving(backend):
    with Ranks(backend, 3, exits, linger=False) as ranks:
        for waiting in (0, 2):
            word = ranks[waiting].hear()
            assert word[2].startswith("rank 1 left the group while"), word
