"""Packing: every next token is a label once, whole documents, little padding."""

from collections import Counter
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.train.packing import BestFit, Stretch, TokenStream, best_fit

BEST_FIT = "xtrain.train.packing:BestFit"
STREAM = "xtrain.train.packing:TokenStream"

few_lengths = st.lists(st.integers(0, 12), min_size=1, max_size=12)


def offsets_of(lengths):
    return torch.tensor([0, *accumulate(lengths)])


def pairs_of(lengths):
    """Every token that has a next one in its document, by its place in the file."""
    ends = offsets_of(lengths).tolist()
    return [
        place
        for begin, length in zip(ends, lengths, strict=False)
        for place in range(begin, begin + length - 1)
    ]


def labelled(run):
    """The tokens of a run that have a label."""
    return range(run.start, min(run.stop, run.end - 1))


@pytest.mark.verifies(BEST_FIT, STREAM)
def test_the_example_of_the_header():
    offsets = offsets_of([7, 2, 3])
    packed = BestFit(offsets, 4)
    assert [packed.runs(k) for k in range(packed.sequences)] == [
        [Stretch(0, 4, 7)],
        [Stretch(4, 7, 7)],
        [Stretch(7, 9, 9)],
        [Stretch(9, 12, 12)],
    ]
    assert packed.padding == 1 - 12 / 16
    stream = TokenStream(offsets, 4, by_document=False)
    assert [stream.runs(k) for k in range(stream.sequences)] == [
        [Stretch(0, 4, 12)],
        [Stretch(4, 8, 12)],
    ]


@pytest.mark.verifies(BEST_FIT)
@settings(max_examples=200)
@given(lengths=few_lengths, length=st.integers(1, 12))
def test_every_next_token_is_a_label_once(lengths, length):
    offsets = offsets_of(lengths)
    if length > sum(lengths) or max(lengths) < 2:
        with pytest.raises(ValueError, match="longer than|two tokens"):
            BestFit(offsets, length)
        return
    packed = BestFit(offsets, length)
    sequences = [packed.runs(k) for k in range(packed.sequences)]
    runs = [run for sequence in sequences for run in sequence]
    assert sorted(p for run in runs for p in labelled(run)) == pairs_of(lengths)
    assert all(len(labelled(run)) > 0 for run in runs)
    filled = [sum(run.stop - run.start for run in s) for s in sequences]
    assert min(filled) > 0 and max(filled) <= length
    assert packed.padding == pytest.approx(1 - sum(filled) / (length * len(filled)))
    firsts = [sequence[0].start for sequence in sequences]
    assert firsts == sorted(firsts)  # in the order of the file, unless shuffled


@pytest.mark.verifies(BEST_FIT)
@settings(max_examples=100)
@given(lengths=few_lengths, length=st.integers(2, 12))
def test_a_document_is_cut_only_if_it_is_longer_than_a_sequence(lengths, length):
    if length > sum(lengths) or max(lengths) < 2:
        return
    packed = BestFit(offsets_of(lengths), length)
    runs = [run for k in range(packed.sequences) for run in packed.runs(k)]
    pieces = Counter(run.end for run in runs)
    for end, size in zip(accumulate(lengths), lengths, strict=True):
        if size > 1:
            assert pieces[end] == -(-(size - 1) // length), (end, size)
            assert {r.stop - r.start for r in runs if r.end == end} <= {
                length,
                *([size % length] if size % length else []),
            }


@pytest.mark.verifies("xtrain.train.packing:best_fit")
@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 9), max_size=20))
def test_pieces_go_where_the_least_room_is_left(sizes):
    chosen = best_fit(sizes, 9)
    filled = Counter()
    for size, sequence in zip(sizes, chosen, strict=True):
        filled[sequence] += size
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else 9) - size)
    assert sorted(9 - size for size in filled.values()) == sorted(rooms)
    assert list(dict.fromkeys(chosen)) == list(range(len(filled)))


@pytest.mark.verifies("xtrain.train.packing:best_fit")
def test_documents_of_many_lengths_leave_little_padding():
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 300, (4000,), generator=drawn, device="cpu").tolist()
    assert BestFit(offsets_of(lengths), 512).padding < 0.005


@pytest.mark.verifies(STREAM)
@settings(max_examples=200)
@given(lengths=few_lengths, length=st.integers(1, 12))
def test_a_stream_loses_only_the_labels_that_fill_no_window(lengths, length):
    total = sum(lengths)
    if total < length + 1:
        with pytest.raises(ValueError, match=f"{total} tokens"):
            TokenStream(offsets_of(lengths), length, by_document=True)
        return
    whole = TokenStream(offsets_of(lengths), length, by_document=False)
    parts = TokenStream(offsets_of(lengths), length, by_document=True)
    assert whole.sequences == parts.sequences == (total - 1) // length
    ends, within = list(accumulate(lengths)), set(pairs_of(lengths))
    for k in range(whole.sequences):
        assert whole.runs(k) == [Stretch(k * length, k * length + length, total)]
        runs = parts.runs(k)
        tokens = [place for run in runs for place in range(run.start, run.stop)]
        assert tokens == list(range(k * length, k * length + length))
        for run in runs:
            assert run.start < run.stop
            assert run.end == next(end for end in ends if end > run.start)
        labels = [place for run in runs for place in labelled(run)]
        assert labels == [place for place in tokens if place in within]


@pytest.mark.verifies(BEST_FIT, STREAM)
def test_a_sequence_longer_than_the_file_is_refused():
    offsets = offsets_of([3, 2])
    assert BestFit(offsets, 5).sequences == 1
    assert TokenStream(offsets, 4, True).sequences == 1
    with pytest.raises(ValueError, match="of 6 tokens .* 5 tokens"):
        BestFit(offsets, 6)
    with pytest.raises(ValueError, match="of 5 tokens and a next one .* 5 tokens"):
        TokenStream(offsets, 5, True)
    with pytest.raises(ValueError, match="none of 3 documents has two tokens"):
        BestFit(offsets_of([1, 0, 1]), 1)
