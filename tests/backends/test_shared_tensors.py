"""Tensors in shared memory: reduced in place, given back, and left nowhere."""

import gc
import os
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.backends.faults import Ranks, named_segments
from xtrain.backends import shared_empty
from xtrain.backends.shared_all_reduce import IN_PLACE_BYTES
from xtrain.backends.shared_memory import SharedMemory
from xtrain.comm import CommLedger

# What the tests here prove, for their marks.
SHARED = (
    "xtrain.backends.shared_memory:SharedMemory",
    "xtrain.backends.shared_tensors:SharedTensors",
    "xtrain.backends:shared_empty",
    "xtrain.comm.reduce_op:reduce_into",
)

SMALL = SharedMemory.ONE_SHOT_BYTES // 4  # the largest that takes one step, in floats
LARGE = IN_PLACE_BYTES // 4  # the largest that is one piece


@pytest.fixture
def shm(worlds_of):
    return worlds_of("xtrain-shm").get


def share(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def reduce_one(count: int, dtype: torch.dtype, op_name: str) -> bytes:
    op = getattr(ReduceOp, op_name)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = shared_empty(count, dtype=dtype)
    assert tensor.shape == (count,) and tensor.dtype == dtype
    tensor.copy_(share(rank, count, dtype))
    address = tensor.data_ptr()
    dist.all_reduce(tensor, op)
    assert tensor.data_ptr() == address
    shares = torch.stack([share(r, count, dtype).double() for r in range(size)])
    exact = {"SUM": shares.sum(0), "AVG": shares.mean(0), "MAX": shares.amax(0)}
    expected = exact[op_name]
    unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    bound = size * unit * shares.abs().sum(0)
    assert ((tensor.double() - expected).abs() <= bound).all()
    return tensor.view(torch.uint8).numpy().tobytes()


HALVES_AND_DOUBLES = (torch.float64, torch.bfloat16, torch.float16)
COUNTS = (0, 1, SMALL, SMALL + 1, 3 * LARGE // 2 + 7, 2 * LARGE)
REDUCED = [
    *product((1, 2, 3, 4, 8), COUNTS, (torch.float32,), ("SUM",)),
    *product((3,), (SMALL * 4 + 5,), HALVES_AND_DOUBLES, ("AVG", "MAX")),
    (4, SMALL + 3, torch.int64, "SUM"),  # whole numbers are exact
]


@pytest.mark.verifies(*SHARED, "xtrain.backends.shared_all_reduce:all_reduce_in_place")
@pytest.mark.parametrize(("size", "count", "dtype", "op"), REDUCED)
def test_all_ranks_get_the_same_bits(shm, size, count, dtype, op):
    assert len(set(shm(size).run(reduce_one, count, dtype, op))) == 1


def nothing_is_staged(count: int) -> tuple[int, int]:
    tensor = shared_empty(count).fill_(1.0)
    with CommLedger() as ledger:
        dist.all_reduce(tensor)
    assert bool((tensor == dist.get_world_size()).all())
    return ledger.bytes_sent, ledger.bytes_received


@pytest.mark.verifies(*SHARED)
@pytest.mark.parametrize("size", [2, 4])
def test_a_large_one_is_not_copied_into_a_stage(shm, size):
    """A rank writes its slice of the sum once, and reads what a staged one reads."""
    count = 2 * LARGE
    part = 4 * count // size
    for told in shm(size).run(nothing_is_staged, count):
        assert told == (part, 2 * (size - 1) * part)


def parts_and_mixtures() -> None:
    """Views at the same place are reduced in place; anything else is right, too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    tensor = shared_empty(2, LARGE, dtype=torch.float32).fill_(0.0)
    other = shared_empty(LARGE).fill_(rank + 1.0)
    lower = tensor[1]
    lower.fill_(rank + 1.0)
    dist.all_reduce(lower)
    assert bool((lower == total).all()) and bool((tensor[0] == 0).all())
    lower.fill_(rank + 1.0)
    private = torch.full((LARGE,), rank + 1.0)
    mixed = [lower, private, other][rank % 3]
    dist.all_reduce(mixed)
    assert bool((mixed == total).all())
    lower.fill_(rank + 1.0)
    place = tensor.view(-1)[rank : rank + LARGE].fill_(rank + 1.0)  # not the same one
    dist.all_reduce(place)
    assert bool((place == total).all())
    columns = tensor.t().fill_(rank + 1.0)  # not contiguous
    dist.all_reduce(columns)
    assert bool((columns == total).all())
    work = dist.all_reduce(tensor.fill_(1.0), async_op=True)
    work.wait()
    assert bool((tensor == size).all())


@pytest.mark.verifies(*SHARED)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_views_and_mixtures_with_private_tensors(shm, size):
    shm(size).run(parts_and_mixtures)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:xtrain")


def freed() -> None:
    before, files = mappings(), len(os.listdir("/proc/self/fd"))
    tensor = shared_empty(1000, dtype=torch.float64)
    assert mappings() == before + dist.get_world_size()
    assert len(os.listdir("/proc/self/fd")) <= files + dist.get_world_size()
    view = tensor[10:20]
    del tensor
    dist.barrier()
    view.fill_(2.0)
    assert mappings() == before + dist.get_world_size()
    del view
    gc.collect()
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) == files
    later = torch.ones(LARGE)
    dist.all_reduce(later)
    assert later[0].item() == dist.get_world_size()


@pytest.mark.verifies(*SHARED)
def test_memory_is_given_back_with_the_last_view(shm):
    shm(3).run(freed)


def some_free_it() -> None:
    """Its peers' views keep a rank's memory until they free theirs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = shared_empty(LARGE).fill_(1.0)
    if rank == 0:
        del tensor
        tensor = torch.ones(LARGE)
    dist.all_reduce(tensor)
    assert bool((tensor == size).all())


@pytest.mark.verifies(*SHARED)
def test_a_rank_may_free_its_own_early(shm):
    shm(3).run(some_free_it)


def in_a_subgroup() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        tensor = shared_empty((3, LARGE), group=group).fill_(1.0)
        dist.all_reduce(tensor, group=group)
        assert bool((tensor == 2).all())
        dist.destroy_process_group(group)
        assert bool((tensor == 2).all())  # the tensor outlives its group


@pytest.mark.verifies(*SHARED)
def test_of_a_subgroup(shm):
    shm(4).run(in_a_subgroup)


def mistakes() -> list[str]:
    rank, texts = dist.get_rank(), []
    with pytest.raises(RuntimeError, match="different calls") as raised:
        shared_empty(5 + rank)
    texts.append(str(raised.value))
    with pytest.raises(RuntimeError, match="different calls"):
        shared_empty(5, dtype=torch.float32 if rank else torch.int32)
    with pytest.raises(RuntimeError, match=r"rank \d has no memory for") as raised:
        shared_empty(1 << 60)
    total = torch.ones(LARGE)
    dist.all_reduce(total)
    assert total[0].item() == dist.get_world_size()
    return texts


@pytest.mark.verifies(*SHARED)
def test_mistakes_are_reported_and_the_group_lives_on(shm):
    texts = {text for texts in shm(3).run(mistakes) for text in texts}
    assert len(texts) == 1
    for rank in range(3):
        assert f"rank {rank}: shared_empty([{5 + rank}] float32)" in next(iter(texts))


def on_another_backend() -> None:
    with pytest.raises(ValueError, match='needs a group on "xtrain-shm"'):
        shared_empty(5)


@pytest.mark.verifies("xtrain.backends:shared_empty")
@pytest.mark.parametrize("backend", ["xtrain-socket", "gloo"])
def test_other_backends_have_none(worlds_of, backend):
    worlds_of(backend).get(2).run(on_another_backend)


def busy_in_place(say) -> None:
    tensor = shared_empty(4 * LARGE).fill_(0.0)
    dist.barrier()
    say("here")
    while True:
        dist.all_reduce(tensor)


@pytest.mark.verifies(*SHARED)
def test_a_killed_rank_is_named_and_leaves_nothing():
    with Ranks("xtrain-shm", 3, busy_in_place) as ranks:
        assert ranks.hear() == ["here"] * 3
        ranks[1].kill()
        for survivor in (ranks[0], ranks[2]):
            how, _, text = survivor.hear()
            assert how == "raised"
            assert text.startswith("rank 1 died while rank")
    assert not named_segments()
