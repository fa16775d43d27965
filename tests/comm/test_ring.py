"""The ring: reduce-scatter, all-gather, and the all-reduce that they make."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm.reference import (
    ARITHMETIC,
    BITS,
    FLOATS,
    INTS,
    LAYOUTS,
    Laid,
    assert_reduced,
    assert_same_on_all_ranks,
    input_of,
    legal,
)
from xtrain.comm import (
    CommLedger,
    all_gather_into_tensor,
    all_gather_single,
    reduce_scatter_single,
    reduce_scatter_tensor,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from xtrain.comm.ring import all_gather_chunks, reduce_scatter_chunks

PIECES = ((), (0,), (1,), (3,), (7,), (2, 3), (0, 4), (5, 1, 2))


def the_two_halves(numel: int) -> None:
    """Each rank's own chunk is finished after the first half, all after the second."""
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = torch.arange(numel) * 10**rank
    whole = torch.arange(numel) * sum(10**r for r in range(size))
    chunks, finished = flat.tensor_split(size), whole.tensor_split(size)
    reduce_scatter_chunks(chunks, ReduceOp.SUM)
    assert torch.equal(chunks[rank], finished[rank])
    if size > 1 and numel >= 2 * size:
        assert not torch.equal(flat, whole)
    all_gather_chunks(chunks)
    assert torch.equal(flat, whole)
    average = torch.full((numel,), float(rank))
    reduce_scatter_chunks(average.tensor_split(size), ReduceOp.AVG)
    mine = average.tensor_split(size)[rank]
    assert mine.tolist() == [(size - 1) / 2] * mine.numel()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("numel", [7, 16])
@pytest.mark.verifies(
    "xtrain.comm.ring:reduce_scatter_chunks", "xtrain.comm.ring:all_gather_chunks"
)
def test_each_half_finishes_its_chunks(world, size, numel):
    world(size).run(the_two_halves, numel)


def whole_shapes(size, shape):
    """The two layouts of N pieces: stacked, and one after the other."""
    yield (size, *shape)
    if shape:
        yield (size * shape[0], *shape[1:])


def reduce_scatter_cases(*functions, ops=ARITHMETIC + BITS, layouts=LAYOUTS) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(s, w) for s in PIECES for w in whole_shapes(size, s)]
    pairs = itertools.product(ops, FLOATS + INTS)
    legal_pairs = [pair for pair in pairs if legal(*pair)]
    for case, (op, dtype) in enumerate(legal_pairs * 2):
        shape, whole_shape = shapes[case % len(shapes)]
        inputs = [input_of(r, whole_shape, dtype, case) for r in range(size)]
        mine = Laid(inputs[rank], layouts[case % len(layouts)])
        layout = layouts[case // len(layouts) % len(layouts)]
        output = Laid(torch.ones(shape, dtype=dtype), layout)
        run = functions[case % len(functions)]
        assert run(output.tensor, mine.tensor, op) is None
        pieces = [t.reshape(size, *shape)[rank] for t in inputs]
        what = (op, dtype, shape, whole_shape)
        assert_reduced(output.tensor, pieces, op, what)
        mine.assert_untouched()
        output.assert_surroundings_untouched()
        if dtype.is_floating_point or op in BITS:  # NCCL has no BITS
            continue
        # Flat, since gloo's own takes neither empty tensors nor all layouts.
        if output.tensor.numel() > 0:
            twin = torch.ones(output.tensor.numel(), dtype=dtype)
            dist.reduce_scatter_tensor(twin, inputs[rank].reshape(-1), op)
            assert torch.equal(output.tensor.reshape(-1), twin), what


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies(
    "xtrain.comm.ring:ring_reduce_scatter",
    "xtrain.comm.collectives:reduce_scatter_tensor",
)
def test_reduce_scatter_equals_one_process(world, size):
    world(size).run(
        reduce_scatter_cases,
        ring_reduce_scatter,
        reduce_scatter_tensor,
        reduce_scatter_single,
    )


def all_gather_cases(*functions, layouts=LAYOUTS) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(s, w) for s in PIECES for w in whole_shapes(size, s)]
    cases = list(itertools.product(shapes, layouts)) * 2
    for case, ((shape, whole_shape), layout) in enumerate(cases):
        dtype = (FLOATS + INTS)[case % len(FLOATS + INTS)]
        inputs = [input_of(r, shape, dtype, case) for r in range(size)]
        mine = Laid(inputs[rank], layouts[case // len(layouts) % len(layouts)])
        output = Laid(torch.ones(whole_shape, dtype=dtype), layout)
        run = functions[case % len(functions)]
        assert run(output.tensor, mine.tensor) is None
        expected = torch.stack(inputs).view(whole_shape)
        assert torch.equal(output.tensor, expected), (shape, whole_shape, layout)
        mine.assert_untouched()
        output.assert_surroundings_untouched()
        twin = torch.ones(expected.numel(), dtype=dtype)
        dist.all_gather_into_tensor(twin, inputs[rank].reshape(-1))
        assert torch.equal(output.tensor.reshape(-1), twin)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies(
    "xtrain.comm.ring:ring_all_gather", "xtrain.comm.collectives:all_gather_into_tensor"
)
def test_all_gather_equals_one_process(world, size):
    world(size).run(
        all_gather_cases, ring_all_gather, all_gather_into_tensor, all_gather_single
    )


def in_place_and_gradients(
    ring_all_gather=ring_all_gather, ring_reduce_scatter=ring_reduce_scatter
) -> None:
    """The input may be the output's own slice, and may require gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.full((size, 3), -1.0)
    whole[rank] = rank
    ring_all_gather(whole, whole[rank])
    assert torch.equal(whole, torch.arange(float(size)).view(-1, 1).expand(-1, 3))

    whole = torch.arange(3.0 * size).view(size, 3) * (rank + 1)
    expected = torch.arange(3.0 * size).view(size, 3)[rank]
    expected = expected * (size * (size + 1) / 2)
    ring_reduce_scatter(whole[rank], whole)
    assert torch.equal(whole[rank], expected)

    piece = torch.nn.Parameter(torch.full((2,), float(rank)))
    whole = torch.zeros(2 * size, requires_grad=True)
    ring_all_gather(whole, piece)
    assert torch.equal(whole.detach(), torch.arange(float(size)).repeat_interleave(2))
    ring_reduce_scatter(piece, whole)
    assert torch.equal(piece.detach(), torch.full((2,), float(rank * size)))
    assert piece.grad is None
    assert piece.requires_grad


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.verifies(
    "xtrain.comm.ring:ring_reduce_scatter", "xtrain.comm.ring:ring_all_gather"
)
def test_in_place_slices_and_gradients(world, size):
    world(size).run(in_place_and_gradients)


def halves_make_the_whole(
    numel,
    ring_reduce_scatter=ring_reduce_scatter,
    ring_all_gather=ring_all_gather,
    ring_all_reduce=ring_all_reduce,
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = input_of(rank, (numel * size,), torch.float32)
    shard, gathered = torch.empty(numel), torch.empty(numel * size)
    ring_reduce_scatter(shard, tensor)
    ring_all_gather(gathered, shard)
    ring_all_reduce(tensor)
    assert torch.equal(gathered, tensor)
    assert_same_on_all_ranks(gathered)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.verifies(
    "xtrain.comm.ring:ring_all_reduce",
    "xtrain.comm.ring:ring_reduce_scatter",
    "xtrain.comm.ring:ring_all_gather",
)
def test_all_reduce_is_reduce_scatter_then_all_gather(world, size):
    """Not nearly: bit for bit, because both add in the same order."""
    world(size).run(halves_make_the_whole, 13)


def ring_neighbours_only(numel):
    rank, size = dist.get_rank(), dist.get_world_size()
    with CommLedger() as ledger:
        ring_all_reduce(torch.ones(numel), ReduceOp.MAX)
    for event in ledger.events:
        step = 1 if event.kind == "send" else -1
        assert event.peer == (rank + step) % size
    return ledger.bytes_sent


@pytest.mark.parametrize(("size", "numel"), [(2, 10), (3, 9), (4, 8), (8, 16)])
@pytest.mark.verifies("xtrain.comm.ring:ring_all_reduce")
def test_a_ring_talks_to_neighbours_and_sends_the_least(world, size, numel):
    sent = world(size).run(ring_neighbours_only, numel)
    assert sent == [2 * (size - 1) * numel // size * 4] * size
