"""Who is let in, what is believed, and what bytes from outside can do: nothing."""

import ast
import contextlib
import logging
import os
import random
import secrets
import socket
import struct
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import xtrain.backends
from tests.backends.faults import Ranks
from xtrain.backends import door, handshake
from xtrain.backends.handshake import HELLO, MAGIC, Refused, admit, dial, proof
from xtrain.backends.liveness import Peers
from xtrain.backends.meeting import meet
from xtrain.backends.messages import (
    DTYPES,
    HEADER,
    Garbled,
    Inbox,
    Receive,
    send_message,
)
from xtrain.backends.segments import length_for, open_segment

GROUP, SECRET = b"g" * 32, b"a secret of this test"

pytestmark = [
    pytest.mark.verifies(
        "xtrain.backends.handshake:admit",
        "xtrain.backends.handshake:dial",
        "xtrain.backends.handshake:read_secret",
        "xtrain.backends.handshake:check_user",
        "xtrain.backends.door:Door",
        "xtrain.backends.door:listen",
    )
]


# -------------------------------------------------------------------------- handshake


class Guest(threading.Thread):
    """The listener's side of one handshake, in a thread: `.who` or `.refused`."""

    def __init__(self, sock: socket.socket, secret=SECRET, group=GROUP, me=0, size=4):
        super().__init__()
        self.who = self.refused = None
        self._arguments = (sock, secret, group, me, size)
        self.start()

    def run(self) -> None:
        try:
            self.who = admit(*self._arguments)
        except (Refused, OSError) as error:
            self.refused = str(error)

    def verdict(self) -> object:
        self.join(20)
        return self.who or self.refused


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX)


def test_a_member_is_admitted():
    ours, theirs = pair()
    guest = Guest(ours)
    dial(theirs, SECRET, GROUP, 2, 0, 1)
    assert guest.verdict() == (2, 1)


@pytest.mark.parametrize(
    ("secret", "group", "me", "peer", "says"),
    [
        (b"a guess", GROUP, 2, 0, "closed after 0 of 32"),
        (b"", GROUP, 2, 0, "closed after 0 of 32"),
        (SECRET, b"h" * 32, 2, 0, "another group"),
        (SECRET, GROUP, 2, 1, "this is rank 0"),
        (SECRET, GROUP, 0, 0, "this is rank 0"),
        (SECRET, GROUP, 9, 0, "this is rank 0"),
    ],
)
def test_a_stranger_is_refused_by_both_sides(secret, group, me, peer, says):
    ours, theirs = pair()
    guest = Guest(ours)
    closer = threading.Thread(target=lambda: (guest.join(), ours.close()))
    closer.start()
    with pytest.raises((Refused, OSError)):
        dial(theirs, secret, group, me, peer, 0)
    theirs.close()
    assert says in guest.verdict()
    closer.join()


def test_a_listener_without_the_secret_gets_no_proof():
    """The dialler speaks last: it proves nothing to a listener that could not."""
    ours, theirs = pair()
    heard = []

    def impostor() -> None:
        heard.append(ours.recv(4096))
        ours.sendall(secrets.token_bytes(16 + 32))
        heard.append(ours.recv(4096))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(Refused, match="does not know the secret"):
        dial(theirs, SECRET, GROUP, 2, 0, 0)
    theirs.close()
    thread.join()
    assert len(heard[0]) == HELLO.size
    assert heard[1] == b""


def test_a_recorded_handshake_proves_nothing_again():
    ours, middle = pair()
    other, theirs = pair()
    guest = Guest(ours)
    recorded = []

    def relay() -> None:
        for size in (HELLO.size, 32):
            data = handshake.read_exactly(other, size, time.monotonic() + 5)
            recorded.append(data)
            middle.sendall(data)
            back = 48 if size != 32 else 8
            other.sendall(handshake.read_exactly(middle, back, time.monotonic() + 5))

    thread = threading.Thread(target=relay)
    thread.start()
    dial(theirs, SECRET, GROUP, 2, 0, 1)
    assert guest.verdict() == (2, 1)
    thread.join()

    ours, replay = pair()
    guest = Guest(ours)
    for data in recorded:
        replay.sendall(data)
    assert guest.verdict() == "rank 2 does not know the secret"


def test_a_listeners_proof_is_no_diallers_proof():
    ours, theirs = pair()
    guest = Guest(ours)
    theirs.sendall(HELLO.pack(MAGIC, GROUP, 2, 0, 0, bytes(16)))
    answer = handshake.read_exactly(theirs, 48, time.monotonic() + 5)
    theirs.sendall(answer[16:])  # reflect it
    assert guest.verdict() == "rank 2 does not know the secret"


def test_without_a_secret_the_kernel_names_the_user(monkeypatch):
    ours, _ = pair()
    handshake.check_user(ours, b"")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(Refused, match="belongs to 12345"):
        handshake.check_user(ours, b"")
    with socket.socket() as tcp, pytest.raises(Refused, match="no secret"):
        handshake.check_user(tcp, b"")


def test_a_slow_stranger_is_sent_away(monkeypatch):
    monkeypatch.setattr(handshake, "SECONDS", 0.3)
    ours, theirs = pair()
    guest = Guest(ours)
    end = time.monotonic() + 10
    while guest.is_alive() and time.monotonic() < end:
        theirs.sendall(b"x")  # a byte now and then does not keep the door open
        time.sleep(0.02)
    assert "too late after" in guest.verdict()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_get_through_the_door(data, begins_well):
    ours, theirs = pair()
    if begins_well:
        data = HELLO.pack(MAGIC, GROUP, 1, 0, 0, bytes(16)) + data
    guest = Guest(ours)
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    assert isinstance(guest.verdict(), str)
    ours.close()
    theirs.close()


# ------------------------------------------------------------------------- the secret


def test_the_secret_comes_from_the_environment_or_a_private_file(monkeypatch, tmp_path):
    monkeypatch.delenv("XTRAIN_SECRET", raising=False)
    monkeypatch.delenv("XTRAIN_SECRET_FILE", raising=False)
    assert handshake.read_secret() == b""
    file = tmp_path / "secret"
    file.write_text("from a file\n")
    monkeypatch.setenv("XTRAIN_SECRET_FILE", str(file))
    for mode in (0o644, 0o640, 0o604, 0o666):
        file.chmod(mode)
        with pytest.raises(ValueError, match="mode 600"):
            handshake.read_secret()
    file.chmod(0o600)
    assert handshake.read_secret() == b"from a file"
    file.write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        handshake.read_secret()
    monkeypatch.setenv("XTRAIN_SECRET", "from the environment")
    assert handshake.read_secret() == b"from the environment"


def test_tcp_only_with_a_secret(monkeypatch):
    monkeypatch.setenv("XTRAIN_SOCKET_ADDRESS", "127.0.0.1")
    with pytest.raises(ValueError, match="needs a secret"):
        door.listen(b"")
    listener, address = door.listen(SECRET)
    assert listener.getsockname()[0] == "127.0.0.1"
    assert address == f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    monkeypatch.delenv("XTRAIN_SOCKET_ADDRESS")
    listener, address = door.listen(b"")
    assert listener.family == socket.AF_UNIX
    assert address.startswith("unix:")
    listener.close()


def over_tcp(say) -> None:
    group = dist.group.WORLD
    families = {c.sock.family for c in group._transport.collective.values()}
    tensor = torch.full((200_000,), 1.0)
    dist.all_reduce(tensor)
    right = (dist.get_rank() + 1) % 3
    request = dist.isend(tensor, right)
    dist.recv(tensor, (dist.get_rank() - 1) % 3)
    request.wait()
    say((families, tensor.eq(3).all().item()))


def test_over_tcp_no_secret_enters_the_store():
    secret = "never-in-the-store-4711"
    environment = {"XTRAIN_SOCKET_ADDRESS": "127.0.0.1", "XTRAIN_SECRET": secret}
    with Ranks("xtrain-socket", 3, over_tcp, environment=environment) as ranks:
        for rank in ranks.ranks:
            assert rank.hear() == ({socket.AF_INET}, True)
        store = ranks.store.read_bytes()
    assert b"tcp:127.0.0.1:" in store
    assert secret.encode() not in store


def test_ranks_with_different_secrets_do_not_meet():
    def body(say, enter, rank: int) -> None:
        os.environ["XTRAIN_SECRET"] = f"secret {rank}"
        enter()

    with Ranks("xtrain-socket", 2, body, join=False, timeout=4.0) as ranks:
        assert "does not know the secret" in ranks[1].hear()[2]
        assert "no connection from ranks [1]" in ranks[0].hear()[2]


# ------------------------------------------------------------- the door of a real group


def attack(address: str, group: bytes, rng: random.Random) -> None:
    """Strangers of every kind at one door."""
    greeting = HELLO.pack(MAGIC, group, 1, 0, 0, bytes(16))
    attacks = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        rng.randbytes(10_000),
        greeting[:30],  # truncated
        HELLO.pack(MAGIC, bytes(32), 1, 0, 0, bytes(16)),  # another group
        HELLO.pack(MAGIC, group, 1 << 31, 0, 255, bytes(16)),
        greeting + bytes(32),  # no proof
        greeting + proof(b"", b"dialler", greeting),
        struct.pack("<Q", 1 << 63) * 20,  # lengths, if anybody believed them
    ]
    for data in attacks:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + address.removeprefix("unix:"))
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            except OSError:
                pass


def besieged(say, enter, rank: int) -> None:
    """Rank 0's door is attacked before the others come."""
    os.environ["XTRAIN_SECRET"] = "only the ranks know"
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: messages.append(entry.getMessage())
    door.refusals.addHandler(handler)
    dialling = door.reach
    if rank == 1:
        known: dict[str, object] = {}

        def spy(store, kind, *rest):
            entries, group = meet(store, kind, *rest)
            known["door"], known["group"] = entries[0].address, group
            attack(entries[0].address, group, random.Random(1))
            return entries, group

        door.meet = spy
    enter()
    door.reach = dialling
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.barrier()
    say(messages)


def test_strangers_are_logged_and_the_group_forms_and_lives_on():
    with Ranks("xtrain-socket", 2, besieged, join=False) as ranks:
        refusals = ranks[0].hear()
        assert ranks[1].hear() == []
    text = "\n".join(refusals)
    assert len(refusals) == 9, text
    for reason in ("no greeting of ours", "another group", "closed after",
                   "does not know the secret", "this is rank 0"):  # fmt: skip
        assert reason in text, text


def full_house(say, enter, rank: int) -> None:
    """More silent strangers than the door serves at a time; they are timed out.

    The one that belongs here has the same time to prove itself, on a busy machine too.
    """
    handshake.SECONDS = 2.0
    held = []
    if rank == 1:

        def spy(store, kind, *rest):
            entries, group = meet(store, kind, *rest)
            for _ in range(80):
                sock = socket.socket(socket.AF_UNIX)
                sock.setblocking(False)
                try:
                    sock.connect("\0" + entries[0].address.removeprefix("unix:"))
                except BlockingIOError:
                    break
                held.append(sock)
            return entries, group

        door.meet = spy
    enter()
    dist.barrier()
    say((len(held), threading.active_count()))


def test_silent_strangers_cannot_fill_the_house():
    with Ranks("xtrain-socket", 2, full_house, join=False) as ranks:
        assert ranks[0].hear() == (0, 1)
        held, threads = ranks[1].hear()
        assert held > 40
        assert threads == 1


def crowd(listener: socket.socket) -> list[socket.socket]:
    """As many guests as may wait at a door."""
    guests = []
    while True:
        guests.append(socket.socket(socket.AF_UNIX))
        guests[-1].setblocking(False)
        try:
            guests[-1].connect(listener.getsockname())
        except BlockingIOError:
            return guests


def test_a_crowd_at_the_door_is_waited_for(monkeypatch):
    """The system turns away whom it has no room to keep waiting: ask again."""
    listener, address = door.listen(b"")
    with listener, contextlib.ExitStack() as stack:
        for guest in crowd(listener):
            stack.enter_context(guest)
        turned_away = threading.Event()

        def nap(seconds: float) -> None:
            turned_away.set()
            time.sleep(seconds)

        def admit_one() -> None:
            assert turned_away.wait(20)
            stack.enter_context(listener.accept()[0])

        porter = threading.Thread(target=admit_one)
        porter.start()
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=nap)
        monkeypatch.setattr(door, "time", clock)
        with door.reach(0, address, same_host=True) as sock:
            assert sock.getpeername() == listener.getsockname()
        porter.join()
        monkeypatch.setattr(door, "REACH_SECONDS", 0.05)
        for guest in crowd(listener):
            stack.enter_context(guest)
        with pytest.raises(BlockingIOError):
            door.reach(0, address, same_host=True)


# ---------------------------------------------------------------------------- framing


class Bytes:
    """A stream from a buffer, in pieces of random size."""

    def __init__(self, data: bytes, rng: random.Random):
        self._data, self._rng = memoryview(data), rng

    def read(self, into: memoryview) -> int:
        count = min(self._rng.randint(0, 40), into.nbytes, self._data.nbytes)
        into[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def write(self, data: memoryview) -> int:
        raise NotImplementedError


class Sink(bytearray):
    def write(self, data: memoryview) -> int:
        self.extend(data)
        return data.nbytes


def frame(payload: bytes, tag: int = 0, dtype: int = 0, site: str = "a.py:1") -> bytes:
    sink = Sink()
    for _ in send_message(sink, memoryview(payload), tag, dtype, site):
        pass
    return bytes(sink)


def drain(inbox: Inbox, turns: int = 4000) -> None:
    for _ in range(turns):
        inbox.pump()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=600), st.integers(0, 2**32))
@pytest.mark.verifies("xtrain.backends.messages:Inbox")
def test_no_bytes_make_a_receive_lie(data, seed):
    """Random frames: garbled, or another size; what is written is a whole message."""
    rng = random.Random(seed)
    inbox = Inbox(1, Bytes(data, rng), max_bytes=1000)
    landing = bytearray(b"\xaa" * 24)
    receive = Receive(memoryview(landing), 0, 7)
    inbox.post(receive)
    with contextlib.suppress(Garbled):
        drain(inbox, 200)
    if receive.error is not None or len(data) < HEADER.size:
        assert landing == b"\xaa" * 24
    if receive.done and receive.error is None:
        assert HEADER.pack(0, 7, 24, b"")[:20] in data
        assert bytes(landing) in data


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.binary(max_size=90), st.integers(0, 2)), max_size=8),
    st.integers(0, 2**32),
)
@pytest.mark.verifies(
    "xtrain.backends.messages:Inbox", "xtrain.backends.messages:send_message"
)
def test_messages_arrive_whole_and_in_order_of_their_tag(messages, seed):
    rng = random.Random(seed)
    stream = Bytes(b"".join(frame(data, tag) for data, tag in messages), rng)
    inbox, wanted = Inbox(1, stream, 1000), []
    order = list(range(len(messages)))
    rng.shuffle(order)
    # Receives of one tag in order; tags in any order; some posted before, some after.
    tags = [messages[k][1] for k in order]
    queues = {t: [d for d, tag in messages if tag == t] for t in set(tags)}
    for tag in tags:
        expected = queues[tag].pop(0)
        receive = Receive(memoryview(bytearray(len(expected))), tag, 0)
        inbox.post(receive)
        wanted.append((receive, expected))
        for _ in range(rng.randint(0, 60)):
            inbox.pump()
    drain(inbox)
    for receive, expected in wanted:
        assert receive.done
        assert receive.error is None
        assert bytes(receive.into) == expected


def test_an_oversized_message_takes_no_memory_and_the_next_arrives(caplog):
    """Nobody waits for it: dropped as it comes, and logged; its receive is told."""
    big = frame(bytes(5000), tag=3)
    inbox = Inbox(1, Bytes(big + frame(b"next"), random.Random(0)), max_bytes=1000)
    with caplog.at_level(logging.WARNING):
        drain(inbox)
    assert "5000 bytes that nobody waits for" in caplog.text
    assert [message[4] for message in inbox._unexpected] == [None, b"next"]
    after = Receive(memoryview(bytearray(4)), 0, 0)
    inbox.post(after)
    assert bytes(after.into) == b"next"
    late = Receive(memoryview(bytearray(5000)), 3, 0)
    inbox.post(late)
    assert "dropped" in late.error


def test_a_receive_from_anybody_takes_one_message():
    """Two peers' messages wait already: the second stays for the next receive."""
    inboxes = [
        Inbox(peer, Bytes(frame(b"from %d" % peer), random.Random(0)), 1000)
        for peer in (1, 2)
    ]
    for inbox in inboxes:
        drain(inbox)
    for peer in (1, 2):
        receive = Receive(memoryview(bytearray(6)), 0, 0)
        for inbox in inboxes:
            inbox.post(receive)
        assert (receive.source, bytes(receive.into)) == (peer, b"from %d" % peer)


def test_a_length_alone_allocates_nothing():
    announced = HEADER.pack(0, 0, 1 << 60, b"")
    inbox = Inbox(1, Bytes(announced, random.Random(0)), max_bytes=1 << 32)
    drain(inbox, 100)  # 2 ** 60 bytes would raise MemoryError


def test_a_site_is_any_bytes():
    """It is made text for an error's sake only, and stays in its place."""
    data = HEADER.pack(0, 0, 4, b"\xff\x00\xfe:7") + b"wide"
    inbox = Inbox(3, Bytes(data + frame(b"next!", site="x" * 900), random.Random(0)), 9)
    narrow, after = (Receive(memoryview(bytearray(n)), 0, 0) for n in (2, 4))
    inbox.post(narrow)
    inbox.post(after)
    drain(inbox)
    assert "sent 4 bytes of uint8 at \ufffd\x00\ufffd:7, but this" in narrow.error
    assert f"sent 5 bytes of uint8 at {'x' * 200}, but this" in after.error


@pytest.mark.parametrize("dtype", [len(DTYPES), 1 << 31])
def test_bytes_that_are_no_frame_are_named(dtype):
    header = HEADER.pack(0, dtype, 4, b"")
    inbox = Inbox(3, Bytes(header + bytes(99), random.Random(0)), 1000)
    with pytest.raises(Garbled, match="rank 3 sent bytes that are no message"):
        drain(inbox)


# ------------------------------------------------------------------- the store's lies


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
    with pytest.raises((ValueError, OSError)):
        open_segment(1, os.getpid(), "../../etc/passwd", 2)


def misled(say, enter, rank: int) -> None:
    """Rank 0 believes that rank 1's memory is at an address that somebody wrote."""
    from xtrain.backends import shared_memory

    if rank == 0:

        def lied_to(store, kind, *rest):
            entries, group = meet(store, kind, *rest)
            lie = replace(entries[1], pid=os.getpid(), address=entries[0].address)
            entries[1] = lie
            return entries, group

        shared_memory.meet = lied_to
    enter()
    time.sleep(2)  # rank 0 gives up in `enter`, and well before rank 1 does here
    dist.barrier()


def test_a_segment_of_somebody_else_is_not_believed():
    with Ranks("xtrain-shm", 2, misled, join=False, timeout=3.0) as ranks:
        assert "ranks [1] did not map the memory of this group" in ranks[0].hear()[2]
        assert ranks[1].hear()[2].startswith("rank 0 left the group")


def test_another_host_is_told_what_to_do(monkeypatch, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    for kind, address, says in (
        ("shm", "3", 'use "xtrain-socket" across hosts'),
        ("socket", "unix:elsewhere", "XTRAIN_SOCKET_ADDRESS"),
    ):
        store.set(f"{kind}/0", f"otherhost/1/2 {os.getpid()} 00 {address}")
        make = xtrain.backends.TRANSPORTS[f"xtrain-{kind}"]
        peers = Peers()
        with pytest.raises(RuntimeError, match=says):
            make(store, 1, 2, 2.0, peers)
        peers.close()


def test_garbage_in_the_store_is_refused(tmp_path):
    for line in ("", "host", "host pid 00 address", "a b c d e f", "host -5 00 x"):
        store = dist.FileStore(str(tmp_path / f"store{len(line)}"), 2)
        store.set("socket/0", line)
        with pytest.raises(RuntimeError, match="no address"):
            meet(store, "socket", 1, 2, "unix:x", 2.0, Peers())


def test_the_backends_unpickle_nothing():
    folder = Path(xtrain.backends.__file__).parent
    for file in folder.glob("*.py"):
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
        }
        assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, file
        assert "torch.load" not in file.read_text()
        assert "eval(" not in file.read_text()


def used_again(say, enter, rank: int) -> None:
    """A second group on the same store: the first one's lines do not mislead it."""
    enter()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    store = dist.FileStore(os.environ["SECOND"], 2)
    for _ in range(3):
        dist.init_process_group(
            os.environ["OURS"], store=store, rank=rank, world_size=2,
            timeout=timedelta(seconds=10),
        )  # fmt: skip
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        dist.destroy_process_group()


def test_groups_one_after_the_other_on_one_store(backend, tmp_path):
    environment = {"SECOND": str(tmp_path / "second"), "OURS": backend}
    with Ranks(backend, 2, used_again, join=False, environment=environment) as ranks:
        for rank in ranks.ranks:
            assert rank.hear() == ("ended", None)
