"""Broadcast, reduce, gather, scatter, all-gather, reduce-scatter, barrier."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.comm.reference import (
    ARITHMETIC,
    BITS,
    FLOATS,
    INTS,
    LAYOUTS,
    SHAPES,
    Laid,
    SameEverywhere,
    assert_reduced,
    input_of,
    legal,
)
from xtrain.comm import (
    CommLedger,
    all_gather,
    barrier,
    broadcast,
    broadcast_naive,
    gather,
    message_rounds,
    reduce,
    reduce_scatter,
    scatter,
)

DTYPES = FLOATS + INTS
SIZES = [1, 2, 3, 4]


def broadcast_cases(run, layouts=LAYOUTS) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    same = SameEverywhere()
    for case, (shape, layout) in enumerate(itertools.product(SHAPES, layouts)):
        dtype, root = DTYPES[case % len(DTYPES)], case % size
        inputs = [input_of(r, shape, dtype, case) for r in range(size)]
        mine = Laid(inputs[rank], layout)
        if case % 3 == 0:
            run(mine.tensor, root)
        elif case % 3 == 1:
            run(mine.tensor, src=root)
        else:
            run(mine.tensor, group_src=root)
        assert torch.equal(mine.tensor, inputs[root]), (shape, layout, dtype)
        mine.assert_surroundings_untouched()
        if rank == root:
            mine.assert_untouched()
        same.add(mine.tensor)
        twin = inputs[rank].clone()
        dist.broadcast(twin, root)
        assert torch.equal(twin, mine.tensor)
    same.check()
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    run(parameter, src=size - 1)
    assert torch.equal(parameter.detach(), torch.full((3,), size - 1.0))


@pytest.mark.parametrize("size", [*SIZES, 8])
@pytest.mark.verifies(
    "xtrain.comm.rooted:broadcast", "xtrain.comm.rooted:broadcast_naive"
)
def test_broadcast_equals_torch(world, size):
    for run in (broadcast, broadcast_naive):
        world(size).run(broadcast_cases, run)


def reduce_cases(reduce=reduce, ops=ARITHMETIC + BITS, layouts=LAYOUTS) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = itertools.product(ops, DTYPES)
    for case, (op, dtype) in enumerate(p for p in pairs if legal(*p)):
        shape = SHAPES[case % len(SHAPES)]
        layout = layouts[case // 3 % len(layouts)]
        root = case % size
        inputs = [input_of(r, shape, dtype, case) for r in range(size)]
        mine = Laid(inputs[rank], layout)
        reduce(mine.tensor, dst=root, op=op)
        if rank == root:
            assert_reduced(mine.tensor, inputs, op, (op, dtype, shape))
            mine.assert_surroundings_untouched()
        else:
            mine.assert_untouched()
        if dtype.is_floating_point or op in BITS:  # NCCL has no BITS
            continue
        twin = inputs[rank].clone()
        dist.reduce(twin, root, op)
        if rank == root:
            assert torch.equal(twin, mine.tensor), (op, dtype, shape)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.verifies("xtrain.comm.rooted:reduce")
def test_reduce_equals_one_process_and_leaves_the_others_alone(world, size):
    world(size).run(reduce_cases)


def gather_and_scatter_cases(gather=gather, scatter=scatter, layouts=LAYOUTS) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for case, (shape, layout) in enumerate(itertools.product(SHAPES, layouts)):
        dtype, root = DTYPES[case % len(DTYPES)], case % size
        other_layout = layouts[case // len(layouts) % len(layouts)]
        where = [{"group_%s": root}, {"%s": root}, {}][case % 3]
        root = root if where else 0

        pieces = [input_of(r, shape, dtype, case) for r in range(size)]
        mine = Laid(pieces[rank], layout)
        outputs = None
        if rank == root:
            outputs = [Laid(torch.ones_like(p), other_layout) for p in pieces]
        gather(
            mine.tensor,
            outputs and [o.tensor for o in outputs],
            **{key % "dst": value for key, value in where.items()},
        )
        mine.assert_untouched()
        twins = [torch.ones_like(p) for p in pieces] if rank == root else None
        dist.gather(pieces[rank].clone(), twins, dst=root)
        for r, output in enumerate(outputs or []):
            assert torch.equal(output.tensor, pieces[r])
            assert torch.equal(output.tensor, twins[r])
            output.assert_surroundings_untouched()

        inputs = None
        if rank == root:
            inputs = [Laid(p, other_layout) for p in pieces]
        output = Laid(torch.ones(shape, dtype=dtype), layout)
        scatter(
            output.tensor,
            inputs and [i.tensor for i in inputs],
            **{key % "src": value for key, value in where.items()},
        )
        assert torch.equal(output.tensor, pieces[rank])
        output.assert_surroundings_untouched()
        for given in inputs or []:
            given.assert_untouched()
        twin = torch.ones(shape, dtype=dtype)
        dist.scatter(twin, pieces if rank == root else None, src=root)
        assert torch.equal(output.tensor, twin)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.verifies("xtrain.comm.rooted:gather", "xtrain.comm.rooted:scatter")
def test_gather_and_scatter_equal_torch(world, size):
    world(size).run(gather_and_scatter_cases)


def uneven_gather_and_scatter() -> None:
    """Pieces of different sizes, as long as both ends agree; some are empty."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = [torch.full((2 * r % 5, 2), float(r)) for r in range(size)]
    outputs = [torch.ones_like(p) for p in pieces] if rank == size - 1 else None
    gather(pieces[rank], outputs, dst=size - 1)
    for output, piece in zip(outputs or [], pieces, strict=False):
        assert torch.equal(output, piece)
    mine = torch.empty_like(pieces[rank])
    scatter(mine, pieces if rank == 0 else None)
    assert torch.equal(mine, pieces[rank])
    outputs = [torch.ones_like(p) for p in pieces]
    all_gather(outputs, pieces[rank])
    assert all(map(torch.equal, outputs, pieces))
    mine = torch.empty_like(pieces[rank])
    reduce_scatter(mine, [p + rank for p in pieces])
    expected = size * pieces[rank] + size * (size - 1) / 2
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies(
    "xtrain.comm.rooted:gather",
    "xtrain.comm.rooted:scatter",
    "xtrain.comm.collectives:all_gather",
    "xtrain.comm.collectives:reduce_scatter",
)
def test_pieces_may_differ_in_size(world, size):
    world(size).run(uneven_gather_and_scatter)


def list_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    same = SameEverywhere()
    pairs = itertools.product(ARITHMETIC + BITS, DTYPES)
    for case, (op, dtype) in enumerate(p for p in pairs if legal(*p)):
        shape = SHAPES[case % len(SHAPES)]
        pieces = [input_of(r, shape, dtype, case) for r in range(size)]
        mine = Laid(pieces[rank], LAYOUTS[case % 4])
        outputs = [
            Laid(torch.ones_like(p), LAYOUTS[(case + r) // 3 % 4])
            for r, p in enumerate(pieces)
        ]
        all_gather([o.tensor for o in outputs], mine.tensor)
        twins = [torch.ones_like(p) for p in pieces]
        dist.all_gather(twins, pieces[rank])
        for piece, output, twin in zip(pieces, outputs, twins, strict=True):
            assert torch.equal(output.tensor, piece), (dtype, shape)
            assert torch.equal(output.tensor, twin)
            output.assert_surroundings_untouched()
            same.add(output.tensor)
        mine.assert_untouched()

        lists = [
            [input_of(10 * r + c, shape, dtype, case) for c in range(size)]
            for r in range(size)
        ]
        inputs = [Laid(t, LAYOUTS[(case + c) % 4]) for c, t in enumerate(lists[rank])]
        output = Laid(torch.ones(shape, dtype=dtype), LAYOUTS[case // 5 % 4])
        reduce_scatter(output.tensor, [i.tensor for i in inputs], op)
        columns = [lists[r][rank] for r in range(size)]
        assert_reduced(output.tensor, columns, op, (op, dtype, shape))
        output.assert_surroundings_untouched()
        for given in inputs:
            given.assert_untouched()
        if dtype.is_floating_point or op in BITS:  # NCCL has no BITS
            continue
        if output.tensor.numel() > 0 and size > 1:
            twin = torch.ones(output.tensor.numel(), dtype=dtype)
            dist.reduce_scatter(twin, [t.reshape(-1) for t in lists[rank]], op)
            assert torch.equal(output.tensor.reshape(-1), twin), (op, dtype, shape)
    same.check()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.verifies(
    "xtrain.comm.collectives:all_gather", "xtrain.comm.collectives:reduce_scatter"
)
def test_list_collectives_equal_torch(world, size):
    world(size).run(list_collectives)


def late_rank(late):
    """A clock that every message carries: nobody leaves before all have come."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with CommLedger() as ledger:
        barrier()
    # What each rank had heard of when its barrier returned, one round at a time.
    store = dist.distributed_c10d._get_default_store()
    key = f"late {late} {len(ledger.events)} {size}"
    if rank == late:
        store.set(key, "here")
        barrier()
        return ledger.events
    barrier()
    assert store.check([key]), "left the barrier before the last rank came"
    return ledger.events


@pytest.mark.parametrize("size", [*SIZES, 8])
@pytest.mark.verifies("xtrain.comm.collectives:barrier")
def test_nobody_leaves_a_barrier_before_all_have_come(world, size):
    for late in range(size):
        events = world(size).run(late_rank, late)
        rounds = message_rounds(events)
        assert len(rounds) == (size - 1).bit_length()
        # Follow who has heard from whom: after the last round everyone from everyone.
        heard = [{rank} for rank in range(size)]
        for messages in rounds:
            before = [set(known) for known in heard]
            for message in messages:
                heard[message.dst] |= before[message.src]
        assert heard == [set(range(size))] * size
