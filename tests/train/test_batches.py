"""Batches: the same global batch for any ranks, workers and start."""

import gc
import re
import threading
import time
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from tests.train.corpora import documents_of, file_of
from xtrain.train.batches import AHEAD, Batches
from xtrain.train.samples import Samples
from xtrain.train.tokens import TokenFile

BATCHES = "xtrain.train.batches:Batches"
BATCH = "xtrain.train.batches:Batch"
LENGTHS = [9, 0, 1, 4, 2, 17, 3, 8, 1, 30, 5]
SIZES = [1, 2, 3, 4, 8]


@pytest.fixture
def path(tmp_path):
    return file_of(tmp_path / "few.tokens", documents_of(LENGTHS)).path


@pytest.fixture
def samples(path):
    return Samples(TokenFile.open(path), 4, seed=5)


def as_lists(batch):
    documents = None if batch.documents is None else batch.documents.tolist()
    return batch.first, batch.tokens.tolist(), batch.labels.tolist(), documents


def joined(parts):
    """Batches of all ranks as one."""
    firsts, *columns = zip(*map(as_lists, parts), strict=True)
    return firsts[0], *(
        None if None in column else [row for rows in column for row in rows]
        for column in columns
    )


class Slow(Samples):
    """Samples that count themselves, and wait or fail where they are told to."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.made, self.failing, self.seconds = [], set(), 0.0

    def __getitem__(self, number):
        time.sleep(self.seconds)
        self.made.append(number)
        if number in self.failing:
            raise OSError(f"no sample {number}")
        return super().__getitem__(number)


@pytest.fixture
def slow(path):
    return Slow(TokenFile.open(path), 4, seed=5)


@pytest.fixture
def workers_now():
    """The threads that batches of this test have."""
    before = set(threading.enumerate())
    return lambda: [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("xtrain-batches")
    ]


@pytest.mark.verifies(BATCHES)
@pytest.mark.parametrize("packing", ["documents", "stream"])
@pytest.mark.parametrize("global_batch", [8, 10, 23])
def test_a_batch_has_the_samples_of_its_numbers(path, packing, global_batch):
    samples = Samples(TokenFile.open(path), 4, packing=packing)
    batches = Batches(samples, global_batch)
    for step in (0, 1, 7, 10**9):  # also across the ends of epochs
        batch = batches[step]
        numbers = range(step * global_batch, (step + 1) * global_batch)
        assert batch.first == numbers[0]
        for row, number in enumerate(numbers):
            tokens, labels, documents = samples[number]
            assert batch.tokens[row].tolist() == tokens.tolist()
            assert batch.labels[row].tolist() == labels.tolist()
            if packing == "stream":
                assert batch.documents is None and documents is None
            else:
                assert batch.documents[row].tolist() == documents.tolist()


@pytest.mark.verifies(BATCHES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("global_batch", [8, 10, 23])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_ranks_in_their_order_make_the_batch_of_one_process(
    samples, size, global_batch, workers
):
    whole = Batches(samples, global_batch)
    for start in (0, 3):
        given = samples, global_batch
        ranks = [Batches(*given, r, size, start, workers) for r in range(size)]
        for step in range(start, start + 4):
            parts = [next(rank) for rank in ranks]
            assert joined(parts) == as_lists(whole[step])
            assert joined([rank[step] for rank in ranks]) == as_lists(whole[step])
            shares = [len(part.tokens) for part in parts]
            assert shares == sorted(shares, reverse=True)
            assert max(shares) - min(shares) <= 1
        for rank in ranks:
            assert rank.step == start + 4
            rank.close()


def batches_of_rank(path, workers, start):
    samples = Samples(TokenFile.open(path), 4, seed=5)
    place = dist.get_rank(), dist.get_world_size()
    with Batches(samples, 11, *place, start, workers) as batches:
        return list(islice(batches, 3))


@pytest.mark.verifies(BATCHES, "xtrain.train.samples:Samples")
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_read_the_file_themselves(world, world_size, path, samples, workers):
    whole = Batches(samples, 11)
    ranks = world(world_size).run(batches_of_rank, path, workers, 2)
    for step, parts in enumerate(zip(*ranks, strict=True), start=2):
        assert joined(parts) == as_lists(whole[step])


@pytest.mark.verifies(BATCHES)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_run_resumes_from_its_step_at_any_size(samples, workers):
    whole = [as_lists(Batches(samples, 9)[step]) for step in range(12)]
    seen, step = [], 0
    for size, steps in ((2, 3), (3, 1), (1, 4), (4, 4)):
        ranks = [Batches(samples, 9, r, size, step, workers) for r in range(size)]
        for _ in range(steps):
            seen.append(joined([next(rank) for rank in ranks]))
        for rank in ranks:
            rank.close()
        (step,) = {rank.step for rank in ranks}
    assert seen == whole


@pytest.mark.verifies(BATCHES)
@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_of_a_worker_is_raised_for_its_step(slow, workers, workers_now):
    slow.failing = {9}  # of step 2
    with Batches(slow, 4, workers=workers) as batches:
        assert [next(batches).first for _ in range(2)] == [0, 4]
        for _ in range(2):
            with pytest.raises(OSError, match="no sample 9"):
                next(batches)
            assert batches.step == 2
    assert workers_now() == []


@pytest.mark.verifies(BATCHES)
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_are_ahead_but_not_far(slow, workers):
    with Batches(slow, 1, start=5, workers=workers) as batches:
        assert slow.made == []  # before the first `next`
        next(batches)
        deadline = time.monotonic() + 30
        while len(slow.made) < AHEAD * workers and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert sorted(slow.made) == [5 + i for i in range(AHEAD * workers)]


@pytest.mark.verifies(BATCHES)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_seconds_of_waiting_are_counted(slow, workers):
    with Batches(slow, 2, workers=workers) as batches:
        assert batches.seconds_waited == 0
        slow.seconds = 0.05
        next(batches)
        assert batches.seconds_waited >= 0.1
        slow.seconds, before = 0, batches.seconds_waited
        time.sleep(0.1)  # of the training, not of waiting
        began = time.perf_counter()
        next(batches)
        inside = time.perf_counter() - began
        assert before < batches.seconds_waited <= before + inside


@pytest.mark.verifies(BATCHES)
def test_closing_ends_the_threads_and_so_does_dropping(slow, workers_now):
    batches = Batches(slow, 1, workers=3)
    next(batches)
    assert len(workers_now()) > 0
    batches.close()
    batches.close()
    assert workers_now() == []
    with pytest.raises(ValueError, match="closed"):
        next(batches)
    dropped = Batches(slow, 1, workers=3)
    next(dropped)
    del dropped
    gc.collect()
    deadline = time.monotonic() + 30
    while workers_now() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert workers_now() == []


@pytest.mark.verifies(BATCH)
def test_the_token_mask_hides_padding(path):
    file = TokenFile.open(path)
    batch = Batches(Samples(file, 16), 5)[0]
    assert batch.token_mask.dtype == torch.bool
    assert batch.token_mask.tolist() == (batch.documents != -1).tolist()
    assert not batch.token_mask.all()
    assert Batches(Samples(file, 16, packing="stream"), 3)[0].token_mask is None


@pytest.mark.verifies(BATCHES)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"global_batch": 3, "size": 4}, "of 3 samples .* 1 micro-batches .* 4 ranks"),
        (
            {"global_batch": 7, "size": 2, "micro_batches": 4},
            "of 7 samples .* 4 micro-batches .* 2 ranks",
        ),
        ({"micro_batches": 0}, "of 8 samples .* 0 micro-batches"),
        ({"rank": 2, "size": 2}, "rank 2 is not one of 2 ranks"),
        ({"rank": -1}, "rank -1 is not one of 1 ranks"),
        ({"start": -1}, "start -1 "),
        ({"workers": -2}, "workers -2 "),
    ],
)
def test_numbers_that_do_not_fit_are_refused(samples, values, words):
    with pytest.raises(ValueError, match=words):
        Batches(samples, **{"global_batch": 8, **values})
    with pytest.raises(ValueError, match=re.escape("step -1 is less than 0")):
        Batches(samples, 8)[-1]


@pytest.mark.verifies(BATCHES)
def test_a_global_batch_of_one_micro_batch_a_rank_is_enough(samples):
    ranks = [Batches(samples, 8, rank, 2, micro_batches=4) for rank in range(2)]
    assert [len(rank[0].tokens) for rank in ranks] == [4, 4]
