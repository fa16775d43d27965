"""A group forms: who does not come is named, and no line in the store is trusted."""

import os
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import xtrain.backends
from tests.backends.faults import Ranks, after_rendezvous, on, stay
from tests.testing.processes import wait_until
from xtrain.backends import addresses, rendezvous
from xtrain.backends.handshake import Refused
from xtrain.backends.peers import Peers
from xtrain.backends.rendezvous import (
    Rendezvous,
    host_key,
    parse_peer_address,
)
from xtrain.backends.segments import length_for, make_memory, open_segment

# What the tests here prove, for their marks.
MEETING = ("xtrain.backends.peers:Peers", "xtrain.backends.rendezvous:Rendezvous")
FORMING = (*MEETING, "xtrain.backends.call_runner:CallRunner")
READ_SECRET = "xtrain.backends.handshake:read_secret"

SOON = 20.0  # seconds; on a quiet machine a death is noticed within 5 ms


def forming(say, enter, rank: int) -> None:
    say("here")
    if rank == 3:
        stay()
    enter()


@pytest.mark.verifies(*FORMING)
def test_a_rank_that_dies_while_the_group_forms_is_named(backend):
    """Rank 3 never comes, so the others are all still forming when rank 1 dies."""
    key = "shm/1" if backend == "xtrain-shm" else "socket/1"
    with Ranks(backend, 4, forming, join=False) as ranks:
        ranks.hear()
        wait_until(lambda: key.encode() in ranks.store.read_bytes())
        killed = ranks[1].kill()
        for survivor in (0, 2):
            word = ranks[survivor].hear()
            assert word[0] == "raised", word
            assert "rank 1 died while the group was being formed" in word[2], word
            assert ranks[survivor].at - killed < SOON


@pytest.mark.verifies(*FORMING)
def test_a_rank_that_never_comes_is_named(backend):
    with Ranks(backend, 4, forming, join=False, timeout=3.0) as ranks:
        ranks.hear()
        for present in (0, 1, 2):
            word = ranks[present].hear()
            assert "not complete within 3 s" in word[2], word
            assert "ranks [3]" in word[2], word


def stuck_after_rendezvous(say, enter, rank: int) -> None:
    """Rank 0 has exchanged addresses with the others, and does nothing more."""
    if rank == 0:
        exchange = Rendezvous.exchange_addresses

        def sleep(self, endpoint):
            exchange(self, endpoint)
            say("here")
            stay()

        Rendezvous.exchange_addresses = sleep
    enter()


@pytest.mark.verifies(*FORMING)
def test_a_rank_that_dies_while_the_others_connect_is_named(backend):
    with Ranks(backend, 3, stuck_after_rendezvous, join=False, timeout=300.0) as ranks:
        ranks[0].hear()
        ranks[0].kill()
        for survivor in (1, 2):
            word = ranks[survivor].hear()
            assert "rank 0 died while the group was being formed" in word[2], word


@pytest.mark.verifies(*FORMING)
def test_the_timeout_limits_connecting_too(backend):
    with Ranks(backend, 3, stuck_after_rendezvous, join=False, timeout=2.0) as ranks:
        ranks[0].hear()
        for waiting in (1, 2):
            word = ranks[waiting].hear()
            assert "the group was not complete within 2 s: " in word[2], word
            assert "ranks [0]" in word[2], word


def late_to_a_new_group(say) -> None:
    if on(1):
        wait_until(Path(os.environ["LATE"]).exists, 60)
    dist.new_group(timeout=timedelta(seconds=1))


@pytest.mark.verifies(
    *FORMING, "xtrain.backends.progress:Progress", "xtrain.backends.peers:PeerMonitor"
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


@pytest.mark.verifies(*MEETING)
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


@pytest.mark.verifies(*MEETING)
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


@pytest.mark.verifies(*MEETING)
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


def test_shared_memory_opens_nothing_but_segments(tmp_path):
    """A line in the store could lead to any file that this user has open."""
    file = tmp_path / "precious"
    file.write_bytes(b"x" * 100)
    refused = pytest.raises(RuntimeError, match="no segment of ours")
    with open(file, "r+b") as opened, refused:
        open_segment(1, os.getpid(), str(opened.fileno()), 2)
    alien = os.memfd_create("other")
    os.ftruncate(alien, length_for(2))
    with pytest.raises(RuntimeError, match="no segment of ours"):
        open_segment(1, os.getpid(), str(alien), 2)
    small = os.memfd_create("xtrain")
    with pytest.raises(RuntimeError, match="no segment of ours"):
        open_segment(1, os.getpid(), str(small), 2)
    os.close(alien)
    os.close(small)
    with pytest.raises(RuntimeError, match="for rank 1 is not an address"):
        open_segment(1, os.getpid(), "../../etc/passwd", 2)


def test_shared_memory_of_another_user_is_refused(monkeypatch):
    ours = make_memory(length_for(2))
    open_segment(1, os.getpid(), str(ours), 2)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RuntimeError, match=rf"of user {os.getuid()}, .* no segment"):
        open_segment(1, os.getpid(), str(ours), 2)
    os.close(ours)


def misled(say, enter, rank: int, given_up: Path) -> None:
    """Rank 0 believes that rank 1's memory is at an address that somebody wrote."""

    if rank == 0:

        def lie(addresses, group) -> None:
            addresses[1] = replace(
                addresses[1], pid=os.getpid(), endpoint=addresses[0].endpoint
            )

        after_rendezvous(lie)
    enter()
    wait_until(given_up.exists)  # rank 0 does, in `enter`
    dist.barrier()


def test_a_segment_of_another_rank_is_not_believed(tmp_path):
    sign = tmp_path / "given up"
    with Ranks("xtrain-shm", 2, misled, sign, join=False, timeout=300.0) as ranks:
        assert "for rank 1 leads to memory of another rank" in ranks[0].hear()[2]
        sign.touch()
        told = ranks[1].hear()[2]
        assert told.startswith(("rank 0 left the group", "rank 0 gave up this group"))


@pytest.mark.verifies(
    "xtrain.backends.acceptor:Acceptor", "xtrain.backends.addresses:listen", READ_SECRET
)
def test_another_host_is_told_what_to_do(monkeypatch, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    for kind, address, says in (
        ("shm", "3", 'use "xtrain-socket" across hosts'),
        ("socket", "unix:elsewhere", "XTRAIN_SOCKET_ADDRESS"),
    ):
        store.set(f"{kind}/0", f"otherhost/1/2 {os.getpid()} {'0' * 32} {address}")
        make, _ = xtrain.backends.BACKENDS[f"xtrain-{kind}"]
        peers = Peers()
        with pytest.raises(RuntimeError, match=says):
            make(store, 1, 2, 2.0, peers)
        peers.close()


def test_memory_of_a_rank_that_gave_up_is_not_blamed(monkeypatch, tmp_path):
    """It has closed its descriptor, and what it opened next has the same number."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    exchange = Rendezvous.exchange_addresses

    def too_late(self, endpoint):
        addresses, group = exchange(self, endpoint)
        store.set("shm/0", "gave-up rank 0 gave up this group: no luck")
        return addresses, group

    monkeypatch.setattr(Rendezvous, "exchange_addresses", too_late)
    with open(tmp_path / "next", "w+b") as reused:
        line = f"{host_key()} {os.getpid()} {TOKEN} {reused.fileno()}"
        store.set("shm/0", line)
        make, _ = xtrain.backends.BACKENDS["xtrain-shm"]
        peers = Peers()
        with pytest.raises(RuntimeError, match="^rank 0 gave up this group: no luck$"):
            make(store, 1, 2, 20.0, peers)
        peers.close()


TOKEN = "0" * 32
GARBAGE = [
    "host",
    "host pid 00 address",
    "a b c d e f",
    f"host -5 {TOKEN} x",
    f"host 0 {TOKEN} x",
    f"host {1 << 40} {TOKEN} x",
    f"host \u0661\u0662 {TOKEN} x",
    f"host 7 {TOKEN[1:]} x",
    f"host 7 {TOKEN} x\ny",
    f"{'h' * 201} 7 {TOKEN} x",
]


@pytest.mark.parametrize("line", GARBAGE)
def test_garbage_in_the_store_is_refused(tmp_path, line):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.set("socket/0", line)
    forming = Rendezvous(store, "socket", 1, 2, 20.0, Peers())
    with pytest.raises(RuntimeError, match="for rank 0 is not an address"):
        forming.exchange_addresses("unix:x")


LIES = st.one_of(
    st.text(max_size=60),
    st.from_regex(r"[a-z/.-]{1,9} [0-9]{1,30} [0-9a-f]{32} \S{1,60}", fullmatch=True),
    st.builds(
        "{} {} {} {}".format,
        st.just(host_key()),
        st.sampled_from([str(os.getpid()), "4194304", "999999999"]),
        st.just(TOKEN),
        st.one_of(
            st.builds(
                "tcp:{}:{}".format, st.text(max_size=9), st.integers(-1, 1 << 70)
            ),
            st.builds("tcp:127.0.0.1:{}".format, st.integers(0, 1 << 17)),
            st.builds("unix:{}".format, st.text(max_size=200)),
            st.integers(-5, 1 << 70).map(str),
            st.text(max_size=9),
        ),
    ),
)


def outcome(act) -> object:
    """What it returns, or the error if it is one that names rank 3."""
    try:
        return act()
    except (RuntimeError, Refused) as error:
        return error if "rank 3" in str(error) else None
    except (FileNotFoundError, ProcessLookupError) as error:
        return error  # of memory that is not there (yet)


@settings(max_examples=200)
@given(LIES)
def test_any_line_is_parsed_or_refused(line):
    """Whatever stands there: parsed, or refused by the name of the rank it is about."""
    address = outcome(lambda: parse_peer_address(3, line))
    if isinstance(address, RuntimeError):
        return
    peers = Peers()
    peers.watch(3, address.pid)
    assert peers.dead() in ([], [3])
    peers.close()
    opened = outcome(lambda: open_segment(3, address.pid, address.endpoint, 2))
    assert isinstance(opened, Exception)
    found = outcome(
        lambda: addresses.parse_address(3, address.endpoint, same_host=True)
    )
    if not isinstance(found, Refused):
        family, target = found
        if family == socket.AF_UNIX:
            assert len(target) < 108
        else:
            assert 0 < target[1] < 1 << 16


def test_one_line_twice_names_two_groups(tmp_path):
    """Same processes, same addresses: the random numbers differ."""
    digests = []
    for attempt in range(2):
        store = dist.FileStore(str(tmp_path / f"store{attempt}"), 1)
        forming = Rendezvous(store, "socket", 0, 1, 20.0, Peers())
        digests.append(forming.exchange_addresses("unix:x")[1])
    assert digests[0] != digests[1]


def test_the_line_of_every_rank_is_in_the_digest(monkeypatch):
    """Who replaces one of them, whichever, gets another group."""
    monkeypatch.setattr(rendezvous.secrets, "token_hex", lambda count: TOKEN)
    digests = []
    for replaced in (None, 0, 2, 3):
        store = dist.HashStore()
        for peer in (0, 2, 3):
            address = "unix:relay" if peer == replaced else f"unix:{peer}"
            store.set(f"socket/{peer}", f"elsewhere 7 {TOKEN} {address}")
        forming = Rendezvous(store, "socket", 1, 4, 20.0, Peers())
        digests.append(forming.exchange_addresses("unix:1")[1])
    assert len(set(digests)) == 4
