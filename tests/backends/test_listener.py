"""The listener of a group: members get in, all others are refused and cost nothing."""

import contextlib
import errno
import logging
import multiprocessing
import os
import random
import re
import secrets
import select
import socket
import struct
import threading
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.backends.faults import Ranks, after_rendezvous
from tests.testing.processes import wait_until
from xtrain.backends import addresses, handshake, socket_calls
from xtrain.backends.acceptor import MAX_HANDSHAKES, MAX_LOGGED, Acceptor, refusals
from xtrain.backends.connect import Dialler, close_all, connect_all
from xtrain.backends.handshake import HELLO, MAGIC, Refused, proof
from xtrain.backends.peers import Peers
from xtrain.backends.rendezvous import PeerAddress, Rendezvous, host_key

# What the tests here prove, for their marks.
ADMIT = "xtrain.backends.handshake:admit"
READ_SECRET = "xtrain.backends.handshake:read_secret"
CONNECTING = (
    "xtrain.backends.acceptor:Acceptor",
    "xtrain.backends.addresses:listen",
    "xtrain.backends.handshake:check_user",
    "xtrain.backends.handshake:dial",
)
JOINING = (*CONNECTING, ADMIT, READ_SECRET)

GROUP = b"g" * 32
SECRET = "only the ranks know"
HELD: list[socket.socket] = []  # open until this process ends


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


def with_secret(say, enter, rank: int, given: tuple[str, str]) -> None:
    os.environ["XTRAIN_SECRET"] = given[rank]
    enter()


@pytest.mark.verifies("xtrain.backends.addresses:listen", READ_SECRET)
def test_a_short_secret_is_refused_and_all_ranks_are_told():
    given = ("no one would guess this", "guess me")
    with Ranks(
        "xtrain-socket", 2, with_secret, given, join=False, timeout=300.0
    ) as ranks:
        assert ranks[1].hear()[1] == "ValueError"
        says = (
            "rank 1 gave up this group: XTRAIN_SECRET: a secret has at least 16 bytes"
        )
        assert ranks[0].hear()[2].startswith(says)


@pytest.mark.verifies(*JOINING)
def test_over_tcp_no_secret_enters_the_store():
    secret = "never-in-the-store-4711"
    environment = {"XTRAIN_SOCKET_ADDRESS": "127.0.0.1", "XTRAIN_SECRET": secret}
    with Ranks("xtrain-socket", 3, over_tcp, environment=environment) as ranks:
        assert ranks.hear() == [({socket.AF_INET}, True)] * 3
        store = ranks.store.read_bytes()
    assert b"tcp:127.0.0.1:" in store
    assert secret.encode() not in store


@pytest.mark.verifies(*JOINING)
def test_ranks_with_different_secrets_do_not_connect():
    """Both are told at once, long before the time is over."""
    given = ("the secret of rank 0", "the secret of rank 1")
    with Ranks(
        "xtrain-socket", 2, with_secret, given, join=False, timeout=300.0
    ) as ranks:
        says = "rank 0 holds another secret than rank 1"
        assert ranks[1].hear()[2] == f"rank 1 cannot join the group: {says}"
        assert ranks[0].hear()[2] == f"rank 1 gave up this group: {says}"


def stranger(endpoint: str) -> socket.socket:
    """A connection to a listener that has proven nothing."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + endpoint.removeprefix("unix:"))
    return sock


def nine_kinds(endpoint: str, group: bytes) -> None:
    """Strangers of every kind at one listener."""

    def hello(*fields) -> bytes:
        return HELLO.pack(MAGIC, *fields, bytes(16))

    def proven(sent: bytes) -> bytes:
        return sent + proof(SECRET.encode(), b"dialler", sent)

    attacks = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        random.Random(1).randbytes(10_000),
        hello(group, 1, 0, 0)[:30],  # truncated
        proven(hello(bytes(32), 1, 0, 0)),  # a rank of ours, of another group
        proven(hello(group, 1 << 31, 0, 255)),
        hello(group, 1, 0, 0) + bytes(32),  # no proof
        hello(group, 1, 0, 0) + proof(b"", b"dialler", hello(group, 1, 0, 0)),
        struct.pack("<Q", 1 << 63) * 20,  # lengths, if they were believed
    ]
    for data in attacks:
        with stranger(endpoint) as sock, contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass


def crowd(endpoint: str, group: bytes) -> None:
    """More strangers than handshakes at a time; every other one is silent."""
    for number in range(MAX_HANDSHAKES + 100):
        HELD.append(stranger(endpoint))
        if number % 2:
            HELD[-1].sendall(b"let me in" * 20)


def log() -> list[str]:
    """The refusals that this process logs from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda line: messages.append(line.getMessage())
    refusals.addHandler(handler)
    return messages


def attacked(say, enter, rank: int, attack) -> None:
    """Rank 1 attacks the listener of rank 0 before it connects itself."""
    os.environ["XTRAIN_SECRET"] = SECRET
    messages = log()
    if rank == 1:
        after_rendezvous(lambda addresses, group: attack(addresses[0].endpoint, group))
    enter()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.barrier()
    say((threading.active_count(), messages))


@pytest.mark.verifies(*JOINING, "xtrain.backends.connect:connect_all")
def test_strangers_are_logged_and_the_group_forms_and_lives_on():
    with Ranks("xtrain-socket", 2, attacked, nine_kinds, join=False) as ranks:
        (_, refusals), (_, none) = ranks.hear()
    assert none == []
    text = "\n".join(refusals)
    assert len(refusals) == 9, text
    for reason in ("no hello of ours", "another group", "closed after",
                   "does not know the secret", "this is rank 0"):  # fmt: skip
        assert reason in text, text


@pytest.mark.verifies(*CONNECTING, READ_SECRET)
def test_a_crowd_of_strangers_takes_neither_threads_nor_the_log():
    with Ranks("xtrain-socket", 2, attacked, crowd, join=False) as ranks:
        (threads, messages), other = ranks.hear()
    assert threads == 1
    assert len(messages) == MAX_LOGGED + 1
    assert re.fullmatch(r"rank 0 refused \d{2,} connections in all", messages[-1])
    assert other == (1, [])


def flood(address: tuple[str, int], seconds: float, stands: Event) -> None:
    """500 silent connections that come again when they are dropped, for a while."""
    end, living, made = time.monotonic() + seconds, {}, 0
    dropped = select.epoll()
    while time.monotonic() < end and made < 200_000 and os.getppid() != 1:
        while len(living) < 500:
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(address)
            living[sock] = time.monotonic()
            dropped.register(sock, select.EPOLLIN)
            made += 1
        stands.set()
        dropped.poll(0.01)
        for sock, since in list(living.items()):
            try:
                over = sock.recv(1) == b""
            except BlockingIOError:
                over = False
            except OSError as error:  # not connected yet: ask again, more eagerly
                late = time.monotonic() > since + 0.1
                over = late or error.errno != errno.ENOTCONN
            if over:
                sock.close()
                del living[sock]


def flooded(say, enter, rank: int) -> None:
    if rank:
        say("here")
        wait_until(Path(os.environ["FLOODED"]).exists, 30)
    enter()
    total = torch.ones(1)
    dist.all_reduce(total)
    say(total.item())


@pytest.mark.verifies(*JOINING)
def test_silent_connections_without_end_keep_no_rank_out(tmp_path):
    """They come while the group waits for its last ranks, and stay for longer."""
    sign = tmp_path / "flooded"
    environment = {
        "XTRAIN_SOCKET_ADDRESS": "127.0.0.1",
        "XTRAIN_SECRET": "silence does not know it",
        "FLOODED": str(sign),
    }
    with Ranks(
        "xtrain-socket", 3, flooded, join=False, environment=environment, timeout=60.0
    ) as ranks:
        found: list[re.Match] = []

        def listens() -> bool:
            stored = ranks.store.exists() and ranks.store.read_bytes()
            found[:] = re.finditer(rb"tcp:127.0.0.1:(\d+)", stored or b"")
            return bool(found)

        wait_until(listens, 30)
        port = int(found[0][1])
        fork = multiprocessing.get_context("fork")
        stands = fork.Event()
        attacker = fork.Process(
            target=flood, args=(("127.0.0.1", port), 60.0, stands), daemon=True
        )
        attacker.start()
        try:
            assert stands.wait(30)
            sign.touch()
            for rank in (1, 2):
                assert ranks[rank].hear() == "here"
            assert ranks.hear(60) == [3] * 3
        finally:
            attacker.kill()
            attacker.join()


def slow_to_say_hello(say, enter, rank: int, refused: Path) -> None:
    """Rank 1 connects, and says nothing for longer than a rank is waited for."""
    messages, pack_hello = log(), handshake.HELLO.pack
    if rank == 0:
        handler = logging.Handler()
        handler.emit = lambda line: refused.touch()
        refusals.addHandler(handler)
    if rank == 1:
        attempts = []

        def pack(*fields):
            attempts.append(fields)
            if len(attempts) == 1:
                wait_until(refused.exists)
            return pack_hello(*fields)

        handshake.HELLO = SimpleNamespace(pack=pack)
    enter()
    dist.barrier()
    say(messages if rank == 0 else len(attempts))


@pytest.mark.verifies(*CONNECTING, READ_SECRET)
def test_a_rank_that_was_too_slow_comes_again(tmp_path):
    sign = tmp_path / "refused"
    with Ranks("xtrain-socket", 2, slow_to_say_hello, sign, join=False) as ranks:
        (message,) = ranks[0].hear()
        assert message == "rank 0 refused a connection: too late after 0 of 65 bytes"
        assert ranks[1].hear() == 3


@contextlib.contextmanager
def open_acceptor(size: int = 2):
    """The acceptor of rank 0, and what the store says of it."""
    listener, endpoint = addresses.listen(b"")
    acceptor = Acceptor(listener, b"", GROUP, 0, size)
    with listener:
        yield acceptor, PeerAddress(host_key(), os.getpid(), endpoint)
    acceptor.close()
    close_all(acceptor.admitted)


def call(address: PeerAddress, purpose: int = 0) -> Dialler:
    """Rank 1 calls rank 0."""
    return Dialler(b"", GROUP, 1, (0, purpose), address)


def advance(call: Dialler, acceptor: Acceptor) -> None:
    """Until the call is answered."""

    def done() -> bool:
        acceptor.advance()
        return call.advance()

    wait_until(done)


@pytest.mark.verifies(*CONNECTING, ADMIT)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_second_authenticated_connection_of_one_rank_is_refused(at_once):
    with open_acceptor() as (acceptor, address):
        first, second = call(address), call(address)
        if at_once:  # both have given their first proof before either gives its second
            assert not first.advance()
            assert not second.advance()
            acceptor.advance()
            assert [one.proven for one in acceptor._handshakes] == [True, True]
        advance(first, acceptor)
        kept = acceptor.admitted[1, 0]
        with pytest.raises(Refused, match="rank 0 is connected with a rank 1 already"):
            advance(second, acceptor)
        assert acceptor.trouble.endswith("rank 1 is connected already")
        assert acceptor.absent() == [1]  # the other purpose
        advance(call(address, 1), acceptor)
        assert acceptor.admitted[1, 0] is kept
        assert not kept.ended()
        assert acceptor.absent() == []


@pytest.mark.verifies(*CONNECTING, ADMIT)
def test_a_full_backlog_is_waited_for(monkeypatch):
    """The system turns away whom it has no room to keep waiting: dial again."""
    monkeypatch.setattr("xtrain.backends.addresses.BACKLOG", 3)
    with open_acceptor() as (acceptor, address), contextlib.ExitStack() as stack:
        full = 0
        while full != errno.EAGAIN:
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.setblocking(False)
            full = silent.connect_ex("\0" + address.endpoint.removeprefix("unix:"))
        turned_away = call(address)
        for _ in range(3):
            assert not turned_away.advance()
        assert "unavailable" in turned_away.trouble
        advance(turned_away, acceptor)
        assert acceptor.admitted.keys() == {(1, 0)}


@pytest.mark.verifies(*CONNECTING, ADMIT)
def test_a_rank_is_served_at_once_behind_any_number_of_silent_strangers():
    with open_acceptor() as (acceptor, address), contextlib.ExitStack() as stack:
        for _ in range(700):
            stack.enter_context(stranger(address.endpoint))
        rank = call(address)
        passes = 0
        while not rank.advance():  # no time passes in which silence could be punished
            acceptor.advance()
            passes += 1
            assert passes < 10
        assert acceptor.admitted.keys() == {(1, 0)}
        assert len(acceptor._handshakes) <= MAX_HANDSHAKES


@pytest.mark.verifies(*JOINING)
def test_a_group_that_does_not_form_keeps_no_connection(monkeypatch):
    """Neither the one that was made, nor that of a stranger who has not spoken yet."""
    monkeypatch.setattr(handshake, "HELLO_SECONDS", 20.0)
    store, secret, errors = dist.HashStore(), b"", []
    monkeypatch.delenv("XTRAIN_SECRET", raising=False)

    def forms_in_vain() -> None:
        try:
            connect_all(store, 0, 2, 2.0, Peers())
        except RuntimeError as error:
            errors.append(error)  # with its frames, so nothing is closed by chance

    rank = threading.Thread(target=forms_in_vain)
    rank.start()
    with Rendezvous(store, "socket", 1, 2, 20.0, Peers()) as forming:
        addresses, group = forming.exchange_addresses("unix:x")
        made = Dialler(secret, group, 1, (0, 0), addresses[0])
        wait_until(made.advance)
        with stranger(addresses[0].endpoint) as silent:
            rank.join()
            silent.settimeout(20)
            assert silent.recv(1) == b""
    assert made.admitted[0, 0].ended()
    made.admitted[0, 0].sock.close()
    why = "the group was not complete within 2 s: no connection with ranks [1]"
    assert [str(error) for error in errors] == [why]


@pytest.mark.verifies(
    "xtrain.backends.acceptor:Acceptor", "xtrain.backends.addresses:listen"
)
def test_an_address_without_a_listener_is_named(monkeypatch):
    monkeypatch.setattr("xtrain.backends.connect.GRACE_SECONDS", 0.05)
    free = f"unix:xtrain-{secrets.token_hex(16)}"
    with open_acceptor() as (acceptor, address):
        vain = call(replace(address, endpoint=free))
        with pytest.raises(Refused, match=f"rank 0: .*refused at {free}"):
            advance(vain, acceptor)


@pytest.mark.verifies(*CONNECTING, ADMIT)
def test_a_proven_connection_stays_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr("xtrain.backends.acceptor.MAX_HANDSHAKES", 3)
    with open_acceptor() as (acceptor, address), contextlib.ExitStack() as stack:
        rank = call(address)
        wait_until(lambda: rank.advance() or acceptor.advance() or acceptor._handshakes)
        for _ in range(9):
            stack.enter_context(stranger(address.endpoint))
            acceptor.advance()
        assert len(acceptor._handshakes) == 3
        assert acceptor.trouble == "the last refusal: too many were here"
        advance(rank, acceptor)
        assert rank.trouble == ""  # it has not had to come again
        assert acceptor.admitted.keys() == {(1, 0)}


class Rewritten:
    """A store in which somebody puts a relay's address into every rank's line.

    All ranks read the same: each its own line, too, as it has been rewritten.
    """

    def __init__(self, store: dist.Store):
        self._store = store
        self.check, self.get = store.check, store.get

    def set(self, key: str, line: str) -> None:
        head, _, address = line.rpartition(" ")
        if address.startswith(("tcp:", "unix:")):
            port = os.environ["RELAYS"].split()[int(key.rpartition("/")[2])]
            self._store.set(f"real-{port}", address)
            line = f"{head} tcp:127.0.0.1:{port}"
        self._store.set(key, line)


def behind_relays(say, enter, rank: int) -> None:
    connect = socket_calls.connect_all
    socket_calls.connect_all = lambda store, *rest: connect(Rewritten(store), *rest)
    enter()
    total = torch.ones(1)
    dist.all_reduce(total)
    say(("summed", total.item()))


def carry(listener: socket.socket, store: Path) -> None:
    """Relay every connection to the rank whose line names this listener."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    while True:
        try:
            left, _ = listener.accept()
        except OSError:
            return  # closed: the test is over
        real = rb"real-%d.*?tcp:127.0.0.1:(\d+)" % listener.getsockname()[1]
        port = int(re.search(real, store.read_bytes(), re.DOTALL)[1])
        try:
            right = socket.create_connection(("127.0.0.1", port))
        except OSError:  # that rank has given up
            left.close()
            continue
        for ends in ((left, right), (right, left)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


@pytest.mark.verifies(*JOINING)
@pytest.mark.parametrize("size", [2, 3])
def test_a_relay_that_rewrites_the_store_joins_no_ranks(size):
    """It knows no secret, only carries what two honest ranks say to each other."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    environment = {
        "XTRAIN_SOCKET_ADDRESS": "127.0.0.1",
        "XTRAIN_SECRET": secrets.token_hex(32),
        "RELAYS": " ".join(str(each.getsockname()[1]) for each in listeners),
    }
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        ranks = stack.enter_context(
            Ranks("xtrain-socket", size, behind_relays, join=False,
                  environment=environment, timeout=60.0)
        )  # fmt: skip
        for listener in listeners:
            relaying = (listener, ranks.store)
            threading.Thread(target=carry, args=relaying, daemon=True).start()
        for word in ranks.hear():
            assert word[:2] == ("raised", "RuntimeError"), word
            says = r"rank \d was given other addresses by the store than rank \d"
            assert re.search(says, word[2]), word


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


@pytest.mark.verifies(*JOINING)
def test_groups_one_after_the_other_on_one_store(backend, tmp_path):
    environment = {"SECOND": str(tmp_path / "second"), "OURS": backend}
    with Ranks(backend, 2, used_again, join=False, environment=environment) as ranks:
        assert set(ranks.hear()) == {("ended", None)}
