"""Samples by number: a permutation of each epoch, right labels and masks."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.model.configs import config_of
from tests.train.corpora import documents_of, file_of
from xtrain.model import XtrainModel
from xtrain.train.samples import Samples, shuffled

SAMPLES = "xtrain.train.samples:Samples"
SHUFFLED = "xtrain.train.samples:shuffled"
LENGTHS = [9, 0, 1, 4, 2, 17, 3, 8, 1, 30, 5]


@pytest.fixture
def file(tmp_path):
    return file_of(tmp_path / "few.tokens", documents_of(LENGTHS))


@pytest.mark.verifies(SHUFFLED)
@settings(max_examples=200)
@given(count=st.integers(1, 400), key=st.binary(max_size=80))
@example(count=1, key=b"")
@example(count=2, key=b"")
def test_a_permutation_of_any_number_of_sequences(count, key):
    places = [shuffled(position, count, key) for position in range(count)]
    assert sorted(places) == list(range(count))


@pytest.mark.verifies(SHUFFLED)
@settings(max_examples=50)
@given(count=st.integers(400, 2**60), key=st.binary(), first=st.integers(0, 2**60))
def test_no_place_comes_twice_among_very_many(count, key, first):
    positions = [(first + i) % count for i in range(40)]
    places = {shuffled(position, count, key) for position in positions}
    assert len(places) == 40 and min(places) >= 0 and max(places) < count


@pytest.mark.verifies(SHUFFLED)
@pytest.mark.parametrize(("count", "first"), [(3, 3), (4, 4), (6, 2), (12, 2)])
def test_all_orders_of_few_are_about_as_frequent(count, first):
    """By chi squared: where each key sends the first positions."""
    kinds = math.perm(count, first)
    found = Counter(
        tuple(shuffled(position, count, b"%d" % key) for position in range(first))
        for key in range(100 * kinds)
    )
    chi_squared = sum((number - 100) ** 2 / 100 for number in found.values())
    assert len(found) == kinds
    assert chi_squared < kinds + 5 * math.sqrt(2 * kinds)


@pytest.mark.verifies(SHUFFLED)
def test_neighbours_are_sent_far_from_each_other():
    count = 10**6
    places = [shuffled(position, count, b"far") for position in range(3000)]
    distances = [abs(a - b) for a, b in zip(places, places[1:], strict=False)]
    assert sum(distances) / len(distances) == pytest.approx(count / 3, rel=0.05)
    assert sum(places) / len(places) == pytest.approx(count / 2, rel=0.05)


@pytest.mark.verifies(SAMPLES)
@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_each_epoch_has_every_sequence_once_in_an_order_of_its_own(file, packing):
    samples = Samples(file, 4, seed=3, packing=packing)
    n = samples.per_epoch
    epochs = [
        [samples.sequence(number) for number in range(epoch * n, epoch * n + n)]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    other = Samples(file, 4, seed=4, packing=packing)
    orders = [*epochs, [other.sequence(number) for number in range(n)]]
    assert len({*map(tuple, orders)}) == 4
    again = Samples(file, 4, seed=3, packing=packing)
    assert again.sequence(5 * n + 2) == samples.sequence(5 * n + 2)
    plain = Samples(file, 4, seed=3, packing=packing, shuffle=False)
    assert [plain.sequence(i) for i in range(2 * n)] == [*range(n), *range(n)]


@pytest.mark.verifies(SAMPLES)
def test_tokens_labels_and_documents_by_hand(tmp_path):
    file = file_of(tmp_path / "a", [[1, 2, 3], [4], [], [5, 6], [7, 8, 9, 10, 11, 12]])

    def listed(length, **options):
        samples = Samples(file, length, shuffle=False, **options)
        found = [samples[number] for number in range(samples.per_epoch)]
        return [[None if t is None else t.tolist() for t in s] for s in found]

    assert listed(5) == [
        [[1, 2, 3, 5, 6], [2, 3, -100, 6, -100], [0, 0, 0, 1, 1]],
        [[7, 8, 9, 10, 11], [8, 9, 10, 11, 12], [0] * 5],
    ]
    assert listed(4) == [
        [[1, 2, 3, 0], [2, 3, -100, -100], [0, 0, 0, -1]],
        [[5, 6, 11, 12], [6, -100, 12, -100], [0, 0, 1, 1]],
        [[7, 8, 9, 10], [8, 9, 10, 11], [0, 0, 0, 0]],
    ]
    assert listed(1) == [[[t], [t + 1], [0]] for t in (1, 2, 5, 7, 8, 9, 10, 11)]
    assert listed(5, packing="stream") == [
        [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6], None],
        [[6, 7, 8, 9, 10], [7, 8, 9, 10, 11], None],
    ]
    assert listed(5, packing="stream", document_masks=True) == [
        [[1, 2, 3, 4, 5], [2, 3, -100, -100, 6], [0, 0, 0, 1, 2]],
        [[6, 7, 8, 9, 10], [-100, 8, 9, 10, 11], [0, 1, 1, 1, 1]],
    ]


@pytest.mark.verifies(SAMPLES)
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 15), min_size=1, max_size=10),
    length=st.integers(1, 10),
    number=st.integers(0, 10**12),
)
def test_a_label_is_the_next_token_of_the_same_document(
    tmp_path_factory, lengths, length, number
):
    if length > sum(lengths) or max(lengths) < 2:
        return
    documents = documents_of(lengths)
    file = file_of(tmp_path_factory.mktemp("drawn") / "a", documents)
    samples = Samples(file, length)
    tokens, labels, masks = (t.tolist() for t in samples[number])
    runs = samples.packing.runs(samples.sequence(number))
    stream = [token for document in documents for token in document]
    place = 0
    for i, run in enumerate(runs):
        for source in range(run.start, run.stop):
            follows = source + 1 < run.end
            wanted = stream[source + 1] if follows else -100
            assert (tokens[place], labels[place]) == (stream[source], wanted)
            assert masks[place] == i
            place += 1
    assert masks[place:] == [-1] * (length - place)
    assert labels[place:] == [-100] * (length - place)
    assert tokens[place:] == [0] * (length - place)


@pytest.mark.verifies(SAMPLES)
def test_a_model_sees_packed_documents_as_if_each_were_alone(file):
    model = XtrainModel(config_of("as many key heads", vocab_size=300)).double()
    samples = Samples(file, 16)
    drawn = (samples[number] for number in range(samples.per_epoch))
    packed = next(s for s in drawn if s.documents.max() > 0 > s.documents[-1])
    tokens, labels, documents = (t[None] for t in packed)
    together = model(tokens, documents=documents)
    total = together.new_zeros(())
    for number in range(int(documents.max()) + 1):
        of_it = documents == number
        alone = model(tokens[of_it][None])[0]
        torch.testing.assert_close(together[of_it], alone)
        total += F.cross_entropy(alone, labels[of_it], reduction="sum")
    loss = model(tokens, labels, documents=documents)
    torch.testing.assert_close(loss, total / (labels != -100).sum())


@pytest.mark.verifies(SAMPLES)
def test_identities_differ_where_samples_do(file, tmp_path):
    other = file_of(tmp_path / "b", documents_of([9, 12]))
    made = [
        Samples(file, 4),
        Samples(file, 5),
        Samples(file, 4, seed=1),
        Samples(file, 4, shuffle=False),
        Samples(file, 4, packing="stream"),
        Samples(file, 4, packing="stream", document_masks=True),
        Samples(other, 4),
    ]
    assert len({str(samples.identity()) for samples in made}) == len(made)
    assert Samples(file, 4).identity() == made[0].identity()


@pytest.mark.verifies(SAMPLES)
def test_padding_is_counted(file):
    samples = Samples(file, 16)
    found = [samples[number].documents for number in range(samples.per_epoch)]
    padded = (torch.stack(found) < 0).double().mean()
    assert 0 < samples.padding == pytest.approx(float(padded))
    assert Samples(file, 7, packing="stream").padding == 0


@pytest.mark.verifies(SAMPLES)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sequence_length": 0}, "sequence_length 0 is less than 1"),
        ({"sequence_length": 81}, "few.tokens: .* 81 tokens .* 80 tokens"),
        ({"sequence_length": 80, "packing": "stream"}, "few.tokens: .* 80 tokens"),
        ({"sequence_length": 8, "packing": "both"}, "packing='both' .* documents"),
    ],
)
def test_values_that_do_not_fit_are_refused(file, values, words):
    with pytest.raises(ValueError, match=words):
        Samples(file, **values)


@pytest.mark.verifies(SAMPLES)
def test_a_number_below_zero_is_refused(file):
    with pytest.raises(ValueError, match="sample -1 is less than 0"):
        Samples(file, 4)[-1]


@pytest.mark.verifies(SAMPLES)
@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_the_default_device_is_of_no_matter(file, packing):
    wanted = Samples(file, 6, packing=packing, document_masks=True)
    with torch.device("meta"):
        found = Samples(file, 6, packing=packing, document_masks=True)[5]
    for a, b in zip(found, wanted[5], strict=True):
        assert a.tolist() == b.tolist()
