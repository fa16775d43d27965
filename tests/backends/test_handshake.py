"""A connection: how it is tuned, and how both of its sides prove themselves."""

import contextlib
import os
import secrets
import select
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.backends import addresses, handshake
from xtrain.backends.connections import WATCH, Connection, tune
from xtrain.backends.handshake import ANSWER, HELLO, MAGIC, Refused, admit, dial, proof

# What the tests here prove, for their marks.
ADMIT = "xtrain.backends.handshake:admit"
READ_SECRET = "xtrain.backends.handshake:read_secret"
HANDSHAKE = (ADMIT, "xtrain.backends.handshake:dial")

GROUP, SECRET = b"g" * 32, b"a secret of this test"


def pair() -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    return Connection(ours), Connection(theirs)


def admitter(ours: Connection, secret=SECRET, group=GROUP, me=0, size=4, admitted=()):
    return ours, admit(ours, secret, group, me, size, admitted)


def dialler(theirs: Connection, secret=SECRET, group=GROUP, me=2, peer=0, purpose=1):
    return theirs, dial(theirs, secret, group, me, peer, purpose)


def verdicts(*parties, between=iter(())) -> list[object]:
    """Advance them until all have ended, in turn and when something has arrived.

    What each returned, or its error.
    """
    ends: dict[int, object] = {}
    limit = time.monotonic() + 20
    while len(ends) < len(parties):
        assert time.monotonic() < limit, ends
        next(between, None)
        for index, (connection, steps) in enumerate(parties):
            if index in ends:
                continue
            try:
                next(steps)
            except StopIteration as end:
                ends[index] = end.value
            except (Refused, OSError) as error:
                ends[index] = str(error)
                connection.sock.close()
        waiting = [parties[i][0].sock for i in range(len(parties)) if i not in ends]
        select.select(waiting, [], [], 0.01)
    return [ends[index] for index in range(len(parties))]


def taken(connection: Connection, count: int, seconds: float = 20.0) -> bytes:
    """The next `count` bytes from a connection."""
    steps = handshake.read_exactly(connection, count, time.monotonic() + seconds)
    (data,) = verdicts((connection, steps))
    assert isinstance(data, bytes), data
    return data


@pytest.mark.verifies(*HANDSHAKE)
def test_a_member_is_admitted():
    ours, theirs = pair()
    assert verdicts(admitter(ours), dialler(theirs)) == [(2, 1), None]


@pytest.mark.verifies(*HANDSHAKE)
@pytest.mark.parametrize(
    ("claim", "we_say", "they_say"),
    [
        ({"secret": b"a guess"}, "does not know", "rank 0 holds another secret"),
        ({"secret": b""}, "does not know", "rank 0 holds another secret"),
        ({"group": b"h" * 32}, "another group", "given other addresses by the store"),
        ({"peer": 1}, "this is rank 0", "rank 1 does not expect rank 2"),
        ({"me": 0}, "this is rank 0", "rank 0 does not expect rank 0"),
        ({"me": 4}, "this is rank 0", "rank 0 does not expect rank 4"),
        ({"purpose": 2}, "this is rank 0", "rank 0 does not expect rank 2"),
    ],
)
def test_a_stranger_is_refused_by_both_sides(claim, we_say, they_say):
    ours, theirs = pair()
    ends = verdicts(admitter(ours), dialler(theirs, **claim))
    assert we_say in ends[0]
    assert they_say in ends[1]


@pytest.mark.verifies(ADMIT)
def test_a_stranger_gets_no_proof_to_try_secrets_on():
    """The dialler proves itself first; without that the answer holds no proof."""
    ours, theirs = pair()
    theirs.write(memoryview(HELLO.pack(MAGIC, GROUP, 2, 0, 0, bytes(16)) + bytes(32)))
    assert verdicts(admitter(ours)) == ["rank 2 does not know the secret"]
    answer = taken(theirs, ANSWER.size)
    assert answer == bytes([handshake.NO_SECRET]) + bytes(48)
    assert theirs.read(memoryview(bytearray(1))) == 0
    assert theirs.lost


@pytest.mark.verifies("xtrain.backends.handshake:dial")
def test_an_impostor_that_listens_is_found_out():
    ours, theirs = pair()
    joins = dialler(theirs)
    next(joins[1])
    heard = taken(ours, HELLO.size + 32)
    ours.write(memoryview(bytes([handshake.GO_ON]) + secrets.token_bytes(48)))
    assert verdicts(joins) == ["the listener of rank 0 does not know the secret"]
    assert ours.read(memoryview(bytearray(1))) == 0  # the second proof never came
    assert heard[: len(MAGIC)] == MAGIC


@pytest.mark.verifies(*HANDSHAKE)
def test_the_welcome_of_a_listener_is_proven_too():
    ours, theirs = pair()
    hosts, joins = admitter(ours)[1], dialler(theirs)
    for _ in range(2):
        next(joins[1])
        with contextlib.suppress(StopIteration):
            next(hosts)
    while theirs.read(memoryview(bytearray(32))):
        pass  # the welcome, replaced
    ours.write(memoryview(bytes(32)))
    assert verdicts(joins) == ["rank 0 did not welcome rank 2"]


def relay(left: Connection, right: Connection, recorded: list, alter):
    """Carry bytes both ways; those from the right are recorded and altered."""
    buffer = memoryview(bytearray(1 << 10))
    while True:
        for source, target in ((left, right), (right, left)):
            data = bytes(buffer[: source.read(buffer)])
            if data and source is right:
                recorded.append(data)
                data = alter(data)
            target.write(memoryview(data))
        yield


def relayed(alter=lambda data: data, **claim) -> tuple[list[bytes], list[object]]:
    """Two ranks with a relay between them: what the dialler sent, and the verdicts."""
    (ours, left), (right, theirs) = pair(), pair()
    recorded: list[bytes] = []
    between = relay(left, right, recorded, alter)
    ends = verdicts(admitter(ours), dialler(theirs, **claim), between=between)
    return recorded, ends


@pytest.mark.verifies(*HANDSHAKE)
def test_a_recorded_handshake_proves_nothing_again():
    recorded, ends = relayed()
    assert ends == [(2, 1), None]
    assert [len(data) for data in recorded] == [HELLO.size + 32, 32]
    ours, replay = pair()
    replay.write(memoryview(b"".join(recorded)))
    assert verdicts(admitter(ours)) == ["rank 2 does not know the secret"]


@pytest.mark.verifies(*HANDSHAKE)
def test_a_relay_cannot_change_what_a_dialler_says():
    """Two ranks that read a relay's lines have other digests; nor can it mend that."""
    assert relayed(group=b"h" * 32)[1][0] == "rank 2 of another group"
    hello = HELLO.pack(MAGIC, GROUP, 2, 0, 1, bytes(16))
    for name, claim in (("group", b"h" * 32), ("me", 3), ("purpose", 0), ("peer", 1)):
        _, (listener, _) = relayed(lambda data: hello[:49] + data[49:], **{name: claim})
        assert listener == "rank 2 does not know the secret", name


@pytest.mark.verifies(*HANDSHAKE)
def test_a_relay_cannot_change_what_a_listener_answers(monkeypatch):
    monkeypatch.setattr(handshake, "PROOF_SECONDS", 0.3)  # no second proof comes
    (ours, left), (right, theirs) = pair(), pair()

    def alter(data: bytes) -> bytes:
        return bytes([handshake.TAKEN]) + data[1:]

    between = relay(right, left, [], alter)
    _, end = verdicts(admitter(ours), dialler(theirs), between=between)
    assert end == "the listener of rank 0 does not know the secret"


@pytest.mark.verifies(*HANDSHAKE)
def test_a_listeners_proof_is_not_a_diallers_proof():
    """Who has recorded a first proof, and sends the listener's own one back."""
    recorded, _ = relayed()
    ours, theirs = pair()
    theirs.write(memoryview(recorded[0]))
    reflects = admitter(ours)
    next(reflects[1])
    answer = taken(theirs, ANSWER.size)
    theirs.write(memoryview(answer[-32:]))
    assert verdicts(reflects) == ["rank 2 does not know the secret"]


@pytest.mark.verifies("xtrain.backends.handshake:check_user")
@pytest.mark.parametrize("secret", [b"", SECRET])
def test_on_a_unix_socket_the_kernel_names_the_user(monkeypatch, secret):
    ours, _ = pair()
    handshake.check_user(ours.sock, secret)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Refused, match="belongs to 12345"):
        handshake.check_user(ours.sock, secret)
    with socket.socket() as tcp:
        if secret:
            handshake.check_user(tcp, secret)
        else:
            with pytest.raises(Refused, match="no secret"):
                handshake.check_user(tcp, secret)


@pytest.mark.verifies(ADMIT)
def test_a_slow_stranger_is_refused(monkeypatch):
    """A byte now and then does not keep a connection open."""
    monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.1)
    ours, theirs = pair()

    def drip():
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                theirs.write(memoryview(b"x"))
                due += 0.01
            yield

    (end,) = verdicts(admitter(ours), between=drip())
    assert "too late after" in end


@pytest.mark.verifies(*HANDSHAKE)
def test_a_dialler_that_is_silent_after_its_first_proof_is_refused(monkeypatch):
    recorded, _ = relayed()
    monkeypatch.setattr(handshake, "PROOF_SECONDS", 0.3)
    ours, theirs = pair()
    theirs.write(memoryview(recorded[0]))
    assert verdicts(admitter(ours)) == ["too late after 0 of 32 bytes"]


@pytest.mark.verifies(ADMIT)
@settings(max_examples=60)
@given(st.binary(max_size=200), st.sampled_from(["", "hello", "proof"]))
def test_no_bytes_are_admitted(data, begins):
    ours, theirs = pair()
    hello = HELLO.pack(MAGIC, GROUP, 1, 0, 0, bytes(16))
    if begins == "hello":
        data = hello + data
    elif begins == "proof":
        data = hello + proof(SECRET, b"dialler", hello) + data
    theirs.write(memoryview(data))
    theirs.sock.shutdown(socket.SHUT_WR)
    (end,) = verdicts(admitter(ours))
    assert isinstance(end, str)
    theirs.sock.close()


@pytest.mark.verifies(READ_SECRET)
def test_the_secret_comes_from_the_environment_or_a_private_file(monkeypatch, tmp_path):
    monkeypatch.delenv("XTRAIN_SECRET", raising=False)
    monkeypatch.delenv("XTRAIN_SECRET_FILE", raising=False)
    assert handshake.read_secret() == b""
    file = tmp_path / "secret"
    file.write_text("sixteen in file.\n")
    monkeypatch.setenv("XTRAIN_SECRET_FILE", str(file))
    for mode in (0o644, 0o640, 0o604, 0o666):
        file.chmod(mode)
        with pytest.raises(ValueError, match="mode 600"):
            handshake.read_secret()
    file.chmod(0o600)
    assert handshake.read_secret() == b"sixteen in file."
    for short, length in (("\n", 0), ("fifteen bytes..\n", 15)):
        file.write_text(short)
        told = f"{file}: .* at least 16 bytes, this one has {length};"
        with pytest.raises(ValueError, match=f"XTRAIN_SECRET_FILE {told}"):
            handshake.read_secret()
    monkeypatch.setenv("XTRAIN_SECRET", "from the environment")
    assert handshake.read_secret() == b"from the environment"
    monkeypatch.setenv("XTRAIN_SECRET", "guess me")
    with pytest.raises(ValueError, match="XTRAIN_SECRET: .* this one has 8;"):
        handshake.read_secret()


@pytest.mark.verifies("xtrain.backends.addresses:listen")
def test_tcp_only_with_a_secret(monkeypatch):
    monkeypatch.setenv("XTRAIN_SOCKET_ADDRESS", "127.0.0.1")
    with pytest.raises(ValueError, match="needs a secret"):
        addresses.listen(b"")
    listener, address = addresses.listen(SECRET)
    assert listener.getsockname()[0] == "127.0.0.1"
    assert address == f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    monkeypatch.delenv("XTRAIN_SOCKET_ADDRESS")
    listener, address = addresses.listen(b"")
    assert listener.family == socket.AF_UNIX
    assert address.startswith("unix:")
    listener.close()


@pytest.mark.verifies(READ_SECRET)
def test_a_secret_in_another_users_file_is_refused(tmp_path, monkeypatch):
    """Who owns the file can read it and change its mode, whatever that is now."""
    file = tmp_path / "secret"
    file.write_bytes(b"sixteen in file.")
    file.chmod(0o600)
    monkeypatch.delenv("XTRAIN_SECRET", raising=False)
    monkeypatch.setenv("XTRAIN_SECRET_FILE", str(file))
    assert handshake.read_secret() == b"sixteen in file."
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ValueError, match="must belong to you"):
        handshake.read_secret()


# ------------------------------------------------------------------------- connections


@pytest.fixture
def tcp():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


@pytest.mark.verifies("xtrain.backends.connections:tune")
def test_a_tuned_connection_sends_at_once_and_probes_in_silence(tcp):
    near, far = tcp
    nodelay = socket.IPPROTO_TCP, socket.TCP_NODELAY
    assert not near.getsockopt(*nodelay)
    tune(near)
    assert near.getsockopt(*nodelay)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for name, value in WATCH.items():
        if hasattr(socket, name):
            found = near.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            assert found == value, name
    near.sendall(b"x")
    assert far.recv(1) == b"x"
