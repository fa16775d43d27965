"""Messages as bytes: those of a tensor, their frames, and what arbitrary bytes do."""

import contextlib
import gc
import logging
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xtrain.backends
from xtrain.backends.messages import (
    DTYPES,
    HEADER,
    Inbox,
    ProtocolError,
    Receive,
    raw,
    send_message,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_the_tensors_own(dtype):
    tensor = torch.zeros(3, dtype=dtype)
    view = raw(tensor)
    assert view.nbytes == 3 * tensor.element_size()
    view[0] = 1
    assert tensor.view(torch.uint8)[0] == 1
    assert raw(tensor[:0]).nbytes == 0
    assert raw(torch.zeros(4, 1, dtype=dtype)[1]).nbytes == tensor.element_size()


def test_the_bytes_keep_the_tensor_alive():
    view = raw(torch.full((1 << 16,), 7, dtype=torch.uint8))
    gc.collect()
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(4)]
    assert set(bytes(view)) == {7}
    assert len(others) == 4


def test_storage_may_be_resized_afterwards():
    """Sharded training gives a gathered buffer's memory back and takes it again."""
    tensor = torch.ones(8)
    raw(tensor)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(32)


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


def inbox_of(data: bytes, peer=1, max_bytes=1000, seed=0) -> Inbox:
    """The inbox of a peer that sends these bytes, in pieces of random size."""
    return Inbox(peer, Bytes(data, random.Random(seed)), max_bytes)


def receive_of(nbytes: int, tag: int = 0) -> Receive:
    return Receive(memoryview(bytearray(nbytes)), tag, 0)


def drain(inbox: Inbox, turns: int = 4000) -> None:
    for _ in range(turns):
        inbox.pump()


@settings(max_examples=150)
@given(st.binary(max_size=600), st.integers(0, 2**32))
@pytest.mark.verifies("xtrain.backends.messages:Inbox")
def test_bytes_that_are_no_frames_fill_no_receive(data, seed):
    inbox = inbox_of(data, seed=seed)
    buffer = bytearray(b"\xaa" * 24)
    receive = Receive(memoryview(buffer), 0, 7)
    inbox.post(receive)
    with contextlib.suppress(ProtocolError):
        drain(inbox, 200)
    if receive.error is not None or len(data) < HEADER.size:
        assert buffer == b"\xaa" * 24
    if receive.done and receive.error is None:
        assert HEADER.pack(0, 7, 24, b"")[:20] in data
        assert bytes(buffer) in data


FRAMES = st.lists(
    st.tuples(
        st.integers(-1, 2),  # tag
        st.sampled_from([0, 7, len(DTYPES) - 1]),
        st.one_of(st.just(24), st.integers(0, 70)),  # bytes of the payload
    ),
    max_size=6,
)


@settings(max_examples=150)
@given(FRAMES, FRAMES, st.integers(0, 2**32))
@pytest.mark.verifies("xtrain.backends.messages:Inbox")
def test_a_receive_takes_the_first_frame_of_its_tag_or_fails(frames, receives, seed):
    """A receive takes the first frame with its tag, whole, or names what is wrong.

    Frames are made from the header's own struct; each payload has a byte of its own.
    """
    rng = random.Random(seed)
    payloads = [bytes([n + 1]) * size for n, (_, _, size) in enumerate(frames)]
    stream = b"".join(
        HEADER.pack(tag, dtype, size, b"a.py:1") + payload
        for (tag, dtype, size), payload in zip(frames, payloads, strict=True)
    )
    inbox = inbox_of(stream, max_bytes=60, seed=seed)
    posted = []
    for tag, dtype, size in receives:
        posted.append(Receive(memoryview(bytearray(b"\xaa" * size)), tag, dtype))
        inbox.post(posted[-1])
        for _ in range(rng.randint(0, 40)):
            inbox.pump()
    drain(inbox, 60)
    left = list(zip(frames, payloads, strict=True))
    for receive, (tag, dtype, size) in zip(posted, receives, strict=True):
        first = next((one for one in left if one[0][0] == tag), None)
        assert receive.done == (first is not None)
        if first is None:
            continue
        left.remove(first)
        (_, sent, sent_size), payload = first
        late = receive.error is not None and "dropped" in receive.error
        right = (sent, sent_size) == (dtype, size) and not late
        assert late <= (sent_size > 60)
        assert (receive.error is None) == right
        assert bytes(receive.into) == (payload if right else b"\xaa" * size)


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
    stream = b"".join(frame(data, tag) for data, tag in messages)
    inbox, wanted = inbox_of(stream, seed=seed), []
    order = list(range(len(messages)))
    rng.shuffle(order)
    # Receives of one tag in order; tags in any order; some posted before, some after.
    tags = [messages[k][1] for k in order]
    queues = {t: [d for d, tag in messages if tag == t] for t in set(tags)}
    for tag in tags:
        expected = queues[tag].pop(0)
        wanted.append((receive_of(len(expected), tag), expected))
        inbox.post(wanted[-1][0])
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
    inbox = inbox_of(big + frame(b"next"))
    with caplog.at_level(logging.WARNING):
        drain(inbox)
    assert "5000 bytes that no receive waits for" in caplog.text
    assert [message[4] for message in inbox._unexpected] == [None, b"next"]
    after, late = receive_of(4), receive_of(5000, tag=3)
    inbox.post(after)
    assert bytes(after.into) == b"next"
    inbox.post(late)
    assert "dropped" in late.error


def test_a_receive_from_any_source_takes_one_message():
    """Two peers' messages wait already: the second stays for the next receive."""
    inboxes = [inbox_of(frame(b"from %d" % peer), peer) for peer in (1, 2)]
    for inbox in inboxes:
        drain(inbox)
    for peer in (1, 2):
        receive = receive_of(6)
        for inbox in inboxes:
            inbox.post(receive)
        assert (receive.source, bytes(receive.into)) == (peer, b"from %d" % peer)


def test_a_length_alone_allocates_nothing():
    announced = HEADER.pack(0, 0, 1 << 60, b"")
    drain(
        inbox_of(announced, max_bytes=1 << 32), 100
    )  # 2 ** 60 bytes would raise MemoryError


def test_a_site_is_any_bytes():
    """It is made text for an error's sake only, and stays in its place."""
    data = HEADER.pack(0, 0, 4, b"\xff\x00\xfe:7") + b"wide"
    inbox = inbox_of(data + frame(b"next!", site="x" * 900), peer=3, max_bytes=9)
    narrow, after = receive_of(2), receive_of(4)
    inbox.post(narrow)
    inbox.post(after)
    drain(inbox)
    assert "sent 4 bytes of uint8 at \ufffd\x00\ufffd:7, but this" in narrow.error
    assert f"sent 5 bytes of uint8 at {'x' * 200}, but this" in after.error


@pytest.mark.parametrize("dtype", [len(DTYPES), 1 << 31])
def test_bytes_that_are_no_frame_are_named(dtype):
    inbox = inbox_of(HEADER.pack(0, dtype, 4, b"") + bytes(99), peer=3)
    with pytest.raises(ProtocolError, match="rank 3 sent bytes that are no message"):
        drain(inbox)


def test_the_backends_unpickle_nothing():
    unsafe = r"^ *(import|from) .*\b(pickle|marshal|shelve|dill|cloudpickle)\b"
    for file in Path(xtrain.backends.__file__).parent.glob("*.py"):
        assert not re.search(unsafe, file.read_text(), re.MULTILINE), file
        assert "torch.load" not in file.read_text()
        assert "eval(" not in file.read_text()
