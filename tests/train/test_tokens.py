"""Files of tokens: what was written is read, and damage is named."""

import os
import re
import struct
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.corpora import file_of
from xtrain.train.tokens import CHECKSUM, MAGIC, NUMBERS, START, VERSION, TokenFile
from xtrain.train.writing import write_tokens

READ = "xtrain.train.tokens:TokenFile"
WRITE = "xtrain.train.writing:write_tokens"
DOCUMENTS = [[1, 2, 3], [], [4, 256, 6, 7], [8]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "few.tokens", DOCUMENTS, 257)


def refused(path: Path, *words: object) -> None:
    """Opening the file raises an error that has its name and these words."""
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        TokenFile.open(path)
    for word in words:
        assert str(word) in str(caught.value)


def with_header(numbers: bytes, rest: bytes) -> bytes:
    """A file with a header whose checksum is right."""
    header = numbers + CHECKSUM.pack(zlib.crc32(numbers))
    return header + bytes(START - len(header)) + rest


@pytest.mark.verifies(READ, WRITE)
@settings(max_examples=60)
@given(data=st.data(), vocab_size=st.sampled_from([1, 2, 256, 257, 2**16, 2**16 + 1]))
def test_what_is_written_is_read(data, vocab_size):
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=5)
    documents = data.draw(st.lists(ids, max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        file = file_of(Path(folder, "a"), documents, vocab_size)
        together = [number for document in documents for number in document]
        assert file.vocab_size == vocab_size
        assert file.read(0, len(together)).tolist() == together
        assert file.offsets.dtype == torch.int64
        ends = file.offsets.tolist()
        assert ends[0] == 0 and len(ends) == len(documents) + 1
        for (begin, end), document in zip(pairwise(ends), documents, strict=True):
            assert file.read(begin, end).tolist() == document
        file.check()


@pytest.mark.verifies(READ, WRITE)
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (256, torch.uint8),
        (257, torch.uint16),
        (2**16, torch.uint16),
        (2**16 + 1, torch.int32),
        (2**31, torch.int32),
    ],
)
def test_the_smallest_dtype_that_holds_the_vocabulary(tmp_path, vocab_size, dtype):
    file = file_of(tmp_path / "a", [[0, vocab_size - 1]], vocab_size)
    assert file.tokens.dtype == dtype
    assert file.read(0, 2).tolist() == [0, vocab_size - 1]
    assert file.read(0, 2).dtype == torch.int64


@pytest.mark.verifies(WRITE)
def test_a_document_may_be_any_sequence_of_integers(tmp_path):
    dtypes = torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64
    documents = [torch.tensor([7, 8], dtype=dtype) for dtype in dtypes]
    file = file_of(tmp_path / "a", [*documents, (7, 8), bytes([7, 8]), range(7, 9)])
    assert file.tokens.tolist() == [7, 8] * 8


@pytest.mark.verifies(READ, WRITE)
def test_a_cut_file_is_refused_wherever_it_is_cut(path):
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refused(path, size, START if size < START else len(whole))
    path.write_bytes(whole + b"\0")
    refused(path, len(whole) + 1, len(whole))


@pytest.mark.verifies(READ)
def test_a_damaged_header_is_refused_wherever_it_is_damaged(path):
    whole = path.read_bytes()
    for place in range(NUMBERS.size + CHECKSUM.size):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        refused(path, "found", "wanted" if place >= len(MAGIC) else MAGIC)


@pytest.mark.verifies(READ)
def test_what_is_no_file_of_tokens_is_refused(tmp_path):
    refused(tmp_path, "no such file")
    refused(tmp_path / "missing", "no such file")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    refused(tmp_path / "pipe", "no such file")
    text = tmp_path / "text"
    text.write_text("once upon a time " * 10)
    refused(text, MAGIC, b"once upo")
    text.write_bytes(with_header(NUMBERS.pack(MAGIC, VERSION + 1, *[1] * 5), b""))
    refused(text, VERSION, VERSION + 1)


@pytest.mark.verifies(READ)
@pytest.mark.parametrize("offsets", [(0, 3, 2, 4), (1, 2, 3, 4), (0, 2, 3, 3)])
def test_offsets_that_do_not_rise_are_refused(tmp_path, offsets):
    path = tmp_path / "a"
    numbers = NUMBERS.pack(MAGIC, VERSION, 1, 9, 4, len(offsets) - 1, 0)
    rest = bytes(8) + struct.pack(f"<{len(offsets)}q", *offsets)
    path.write_bytes(with_header(numbers, rest))
    refused(path, "offsets", f"from {offsets[0]} to {offsets[-1]}", "from 0 to 4")


@pytest.mark.verifies(READ)
@pytest.mark.parametrize(
    ("vocab_size", "width", "wrong"), [(200, 1, 200), (257, 2, 257), (2**17, 4, -1)]
)
def test_an_id_above_the_vocabulary_is_named_when_it_is_read(
    tmp_path, vocab_size, width, wrong
):
    path = write_tokens(tmp_path / "a", [[1, 2, 3], [4, 5]], vocab_size)
    data = bytearray(path.read_bytes())
    signed = width == 4
    data[START + 3 * width : START + 4 * width] = wrong.to_bytes(
        width, "little", signed=signed
    )
    path.write_bytes(data)
    file = TokenFile.open(path)
    assert file.read(0, 3).tolist() == [1, 2, 3]
    assert file.read(4, 5).tolist() == [5]
    named = rf"{path}.* id {wrong} found at token 3, ids 0 to {vocab_size - 1} wanted"
    for read in (lambda: file.read(2, 5), file.check):
        with pytest.raises(ValueError, match=named):
            read()


@pytest.mark.verifies(READ)
def test_a_check_of_the_whole_file_finds_another_id(path):
    TokenFile.open(path).check()
    data = bytearray(path.read_bytes())
    data[START] += 1
    path.write_bytes(data)
    file = TokenFile.open(path)
    with pytest.raises(ValueError, match=f"{path}.*{file.checksum:08x} wanted"):
        file.check()


@pytest.mark.verifies(READ)
def test_a_read_outside_the_file_is_refused(path):
    file = TokenFile.open(path)
    for start, stop in ((-1, 2), (0, 9), (5, 4)):
        with pytest.raises(ValueError, match=f"{start} to {stop} wanted of 8"):
            file.read(start, stop)


@pytest.mark.verifies(WRITE)
@pytest.mark.parametrize(
    "wrong",
    [[-1], [257], [0.5], [True], [[1]], "abc", 7, [2**70], None, torch.tensor(3)],
)
def test_a_wrong_document_is_named_and_the_older_file_stays(path, wrong):
    before = path.read_bytes()
    with pytest.raises(ValueError, match="document 2 "):
        write_tokens(path, [[1], [], wrong, [2]], 257)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.verifies(WRITE)
def test_an_error_of_the_source_leaves_no_file(tmp_path):
    def documents():
        yield [1]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_tokens(tmp_path / "a", documents(), 9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.verifies(WRITE)
@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_a_vocabulary_of_no_dtype_is_refused(tmp_path, vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size {vocab_size} "):
        write_tokens(tmp_path / "a", [], vocab_size)


@pytest.mark.verifies(READ, WRITE)
def test_who_has_a_file_open_keeps_it_when_it_is_replaced(path):
    file = TokenFile.open(path)
    write_tokens(path, [[9] * 10000], 10)
    assert file.read(0, 8).tolist() == [1, 2, 3, 4, 256, 6, 7, 8]
    assert TokenFile.open(path).checksum != file.checksum


@pytest.mark.verifies(READ, WRITE)
def test_the_default_device_is_of_no_matter(tmp_path):
    with torch.device("meta"):
        file = file_of(tmp_path / "a", DOCUMENTS, 257)
        assert file.read(2, 5).tolist() == [3, 4, 256]
        empty = file_of(tmp_path / "b", [], 257)
        assert empty.read(0, 0).tolist() == []


@pytest.mark.verifies(READ)
def test_a_file_larger_than_memory_opens_at_once(tmp_path):
    path, tokens = tmp_path / "a", 2**40
    numbers = NUMBERS.pack(MAGIC, VERSION, 1, 9, tokens, 1, 0)
    with path.open("wb") as file:  # 1 TB that takes no room on the disk
        file.write(with_header(numbers, b""))
        file.seek(START + tokens)
        file.write(struct.pack("<2q", 0, tokens))
    opened = TokenFile.open(path)
    path.unlink()  # before anything copies it
    assert opened.read(tokens - 2, tokens).tolist() == [0, 0]
