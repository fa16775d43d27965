"""Every call of torch.distributed over both backends, against one process's maths."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from tests.backends.conftest import and_under_nccl_rules
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
from tests.testing.processes import wait_until

# What the tests here prove, for their marks.
COLLECTIVE = (
    "xtrain.backends.connections:Connection",
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.operation:Operation",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.segments:Segment",
    "xtrain.backends.shared_memory:SharedMemory",
    "xtrain.backends.socket_calls:SocketCalls",
    "xtrain.backends.sockets:Sockets",
    "xtrain.backends.call_runner:CallRunner",
    "xtrain.backends.works:Finished",
)

DTYPES = FLOATS + INTS
SIZES = [1, 2, 3, 4, 8]
LONG = 700_001  # floats: several stages of shared memory, a ring of many blocks


def under_nccl_rules() -> bool:
    return dist.get_backend() == "nccl-rules"


def operations() -> tuple:
    """NCCL has no bitwise ones."""
    return ARITHMETIC if under_nccl_rules() else ARITHMETIC + BITS


def layouts() -> tuple[str, ...]:
    """Collectives of NCCL take contiguous tensors, anywhere in memory."""
    return ("contiguous", "offset") if under_nccl_rules() else LAYOUTS


def wait(work) -> None:
    if work is not None:
        work.wait()


# ------------------------------------------------------------------ all-reduce, reduce


def all_reduces() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    same = SameEverywhere()
    cases = itertools.product(operations(), DTYPES)
    for case, (op, dtype) in enumerate(c for c in cases if legal(*c)):
        shape = SHAPES[case % len(SHAPES)]
        layout = layouts()[case // 3 % len(layouts())]
        inputs = [input_of(r, shape, dtype, case) for r in range(size)]
        mine = Laid(inputs[rank], layout)
        wait(dist.all_reduce(mine.tensor, op, async_op=case % 2 == 0))
        assert_reduced(mine.tensor, inputs, op, (op, dtype, shape, layout))
        mine.assert_surroundings_untouched()
        same.add(mine.tensor)

        root = case % size
        mine = Laid(inputs[rank], layout)
        wait(dist.reduce(mine.tensor, root, op, async_op=case % 2 == 0))
        if rank == root:
            assert_reduced(mine.tensor, inputs, op, (op, dtype, shape, layout))
            mine.assert_surroundings_untouched()
        else:
            mine.assert_untouched()
    for dtype, op in ((torch.float32, ReduceOp.AVG), (torch.bfloat16, ReduceOp.SUM)):
        inputs = [input_of(r, (LONG,), dtype) for r in range(size)]
        mine = inputs[rank].clone()
        dist.all_reduce(mine, op)
        assert_reduced(mine, inputs, op)
        same.add(mine)
    same.check()


@and_under_nccl_rules
@pytest.mark.verifies(
    *COLLECTIVE,
    "xtrain.backends.ring_stream:RingStream",
    "xtrain.backends.shared_all_reduce:all_reduce_one_shot",
    "xtrain.backends.shared_all_reduce:all_reduce_two_shot",
    "xtrain.comm.reduce_op:reduce_into",
)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_and_reduce(ours, size):
    ours(size).run(all_reduces)


# ------------------------------------------------------- copies from and to every rank


def copies() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everywhere = [*itertools.product(SHAPES, layouts()), ((LONG,), "contiguous")]
    for case, (shape, layout) in enumerate(everywhere):
        dtype, root = DTYPES[case % len(DTYPES)], case % size
        in_background = case % 2 == 0
        inputs = [input_of(r, shape, dtype, case) for r in range(size)]
        mine = Laid(inputs[rank], layout)
        wait(dist.broadcast(mine.tensor, root, async_op=in_background))
        assert torch.equal(mine.tensor, inputs[root]), (shape, layout, dtype)
        mine.assert_surroundings_untouched()

        mine = Laid(inputs[rank], layout)
        outputs = [Laid(torch.ones_like(t), layout) for t in inputs]
        into = [o.tensor for o in outputs]
        wait(dist.all_gather(into, mine.tensor, async_op=in_background))
        for output, expected in zip(outputs, inputs, strict=True):
            assert torch.equal(output.tensor, expected), (shape, layout, dtype)
            output.assert_surroundings_untouched()
        mine.assert_untouched()

        outputs = [Laid(torch.ones_like(t), layout) for t in inputs]
        into = [o.tensor for o in outputs] if rank == root else None
        wait(dist.gather(mine.tensor, into, root, async_op=in_background))
        for output, expected in zip(outputs, inputs, strict=True):
            if rank == root:
                assert torch.equal(output.tensor, expected), (shape, layout, dtype)
                output.assert_surroundings_untouched()
            else:
                output.assert_untouched()

        pieces = [Laid(input_of(root, shape, dtype, 50 + r), layout).tensor
                  for r in range(size)]  # fmt: skip
        mine = Laid(inputs[rank], layout)
        wait(dist.scatter(mine.tensor, pieces if rank == root else None, root,
                          async_op=in_background))  # fmt: skip
        assert torch.equal(mine.tensor, pieces[rank])
        mine.assert_surroundings_untouched()


@and_under_nccl_rules
@pytest.mark.verifies(
    *COLLECTIVE,
    "xtrain.backends.ring_stream:RingStream",
    "xtrain.backends.shared_collectives:all_gather",
    "xtrain.backends.shared_collectives:all_to_all",
    "xtrain.backends.shared_collectives:broadcast",
    "xtrain.backends.works:Pending",
)
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_all_gather_gather_scatter(ours, size):
    ours(size).run(copies)


# ------------------------------------------------ single tensors, uneven pieces, groups


def singles() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for case, dtype in enumerate(DTYPES):
        part = [(3,), (2, 5), (0,), (1,), (4, 1, 2)][case % 5]
        inputs = [input_of(r, part, dtype, case) for r in range(size)]
        whole = torch.ones((size * part[0], *part[1:]), dtype=dtype)
        wait(dist.all_gather_single(whole, inputs[rank], async_op=case % 2 == 0)
             if hasattr(dist, "all_gather_single")
             else dist.all_gather_into_tensor(whole, inputs[rank]))  # fmt: skip
        assert torch.equal(whole, torch.cat(inputs))
        for op in (op for op in operations() if legal(op, dtype)):
            wholes = [input_of(r, whole.shape, dtype, case) for r in range(size)]
            own = [w.chunk(size)[rank] if w.numel() else w for w in wholes]
            out = torch.ones(part, dtype=dtype)
            scatter = getattr(dist, "reduce_scatter_single", None)
            scatter = scatter or dist.reduce_scatter_tensor
            wait(scatter(out, wholes[rank], op, async_op=case % 2 == 0))
            assert_reduced(out, own, op, (op, dtype))
            pieces = [piece.clone() for piece in wholes[rank].view(size, *part)]
            out = torch.ones(part, dtype=dtype)
            dist.reduce_scatter(out, pieces, op)
            assert_reduced(out, own, op, (op, dtype))

    # Rank r sends (r + 2 * peer) % 4 rows to peer; the long case has many of them.
    for rows, dtype in ((1, torch.float32), (60_001, torch.int64), (1, torch.bool)):
        counts = [[(r + 2 * p) % 4 * rows for p in range(size)] for r in range(size)]
        blocks = [[input_of(10 * r + p, (counts[r][p], 2), dtype) for p in range(size)]
                  for r in range(size)]  # fmt: skip
        takes = [counts[r][rank] for r in range(size)]
        expected = [blocks[r][rank] for r in range(size)]
        output = torch.ones((sum(takes), 2), dtype=dtype)
        source = torch.cat(blocks[rank])
        wait(dist.all_to_all_single(output, source, takes, counts[rank],
                                    async_op=rows == 1))  # fmt: skip
        assert torch.equal(output, torch.cat(expected))
        outputs = [torch.ones_like(t) for t in expected]
        dist.all_to_all(outputs, blocks[rank])
        assert all(map(torch.equal, outputs, expected))
    even = torch.arange(2.0 * size) + 100 * rank
    output = torch.empty_like(even)
    dist.all_to_all_single(output, even)
    peers = torch.arange(size).repeat_interleave(2) * 100
    assert torch.equal(output, peers + torch.arange(2.0).repeat(size) + 2 * rank)

    # Uneven reduce-scatter and all-gather through the list forms.
    lengths = [2 * r + 1 for r in range(size)]
    pieces = [torch.full((n,), float(rank + 1)) for n in lengths]
    out = torch.empty(lengths[rank])
    dist.reduce_scatter(out, pieces)
    assert torch.equal(out, torch.full_like(out, size * (size + 1) / 2))
    gathered = [torch.empty(n) for n in lengths]
    dist.all_gather(gathered, torch.full((lengths[rank],), float(rank)))
    expected = [[float(r)] * n for r, n in enumerate(lengths)]
    assert [t.tolist() for t in gathered] == expected


@and_under_nccl_rules
@pytest.mark.verifies(
    *COLLECTIVE, "xtrain.backends.works:Pending", "xtrain.comm.reduce_op:reduce_into"
)
@pytest.mark.parametrize("size", SIZES)
def test_single_tensor_and_uneven_forms(ours, size):
    ours(size).run(singles)


def groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    evens = dist.new_group(list(range(0, size, 2)))
    odds = dist.new_group(list(range(1, size, 2)))
    mine, members = odds if rank % 2 else evens, range(rank % 2, size, 2)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=mine)
    assert total.item() == sum(members)
    dist.broadcast(total.fill_(rank), members[-1], group=mine)
    assert total.item() == members[-1]

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    row = torch.tensor(float(rank))
    dist.all_reduce(row, group=mesh["tensor"].get_group())
    start = rank // (size // 2) * (size // 2)
    assert row.item() == sum(range(start, start + size // 2))
    column = functional.all_reduce(torch.tensor(float(rank)), "sum",
                                   mesh["data"].get_group())  # fmt: skip
    assert column.item() == rank % (size // 2) * 2 + size // 2
    both = functional.all_gather_tensor(torch.tensor([rank]), 0,
                                        mesh["data"].get_group())  # fmt: skip
    assert both.tolist() == [rank % (size // 2), rank % (size // 2) + size // 2]
    dist.barrier(mine)
    dist.destroy_process_group(mine)
    dist.barrier()


@and_under_nccl_rules
@pytest.mark.verifies(*COLLECTIVE, "xtrain.comm.reduce_op:reduce_into")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_groups_and_meshes(ours, size):
    ours(size).run(groups)


# ------------------------------------------------------------------------- the handles


def handles() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((n,), float(rank + 1)) for n in (1, 5, 400_000, 0, 3)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    total = size * (size + 1) / 2
    for work in reversed(works):  # any order of waiting
        assert work.wait() is True or work.wait() is None
        assert work.is_completed()
        assert under_nccl_rules() or work.is_success()
    assert all(torch.equal(t, torch.full_like(t, total)) for t in tensors)

    tensor = torch.full((300_000,), float(rank + 1))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    (value,) = future.then(lambda f: [t / size for t in f.value()]).wait()
    assert torch.equal(value, torch.full_like(tensor, total / size))
    dist.barrier(async_op=True).wait()

    many = [torch.full((3,), float(rank + k)) for k in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in many:
            dist.all_reduce(t)
    manager.wait()
    for k, t in enumerate(many):
        assert t.tolist() == [sum(r + k for r in range(size))] * 3
    wholes = [torch.empty(size * n) for n in (1, 2)]
    with dist._coalescing_manager():
        for n, whole in zip((1, 2), wholes, strict=True):
            dist.all_gather_into_tensor(whole, torch.full((n,), float(rank)))
    assert wholes[1].tolist() == [float(r) for r in range(size) for _ in range(2)]

    # Work that was started goes on when no thread waits for it.
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    if rank == 0:
        wait_until(work.is_completed)
    work.wait()


@and_under_nccl_rules
@pytest.mark.verifies(*COLLECTIVE, "xtrain.comm.reduce_op:reduce_into")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_handles_futures_and_coalescing(ours, size):
    ours(size).run(handles)


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]
    words = [rank, "from", size - 1] if rank == size - 1 else [None] * 3
    dist.broadcast_object_list(words, size - 1)
    assert words == [size - 1, "from", size - 1]
    collected = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, collected, 0)
    assert rank or collected == [2 * r for r in range(size)]
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(size)], 0)
    assert got == [f"for {rank}"]
    if size > 1 and rank < 2:
        if rank == 0:
            dist.send_object_list(["hello", 1], 1)
        else:
            heard = [None, None]
            dist.recv_object_list(heard, 0)
            assert heard == ["hello", 1]


@and_under_nccl_rules
@pytest.mark.verifies(*COLLECTIVE, "xtrain.backends.works:Pending")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_object_collectives(ours, size):
    ours(size).run(objects)


# ---------------------------------------------------------------------- point-to-point


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    # Many in flight both ways, larger than any buffer, every dtype and layout.
    lengths = [0, 1, 7, 1000, LONG, 3]
    cases = [((lengths[k % 6],), dtype, LAYOUTS[k % 4]) for k, dtype in
             enumerate(DTYPES)]  # fmt: skip
    sends, receives = [], []
    for k, (shape, dtype, layout) in enumerate(cases):
        out = Laid(input_of(rank, shape, dtype, k), layout)
        into = Laid(torch.ones(shape, dtype=dtype), layout)
        sends.append((out, dist.isend(out.tensor, right, tag=k)))
        receives.append((into, dist.irecv(into.tensor, left, tag=k)))
    for k in reversed(range(len(cases))):  # tags out of order
        into, work = receives[k]
        work.wait()
        assert torch.equal(into.tensor, input_of(left, *cases[k][:2], k))
        into.assert_surroundings_untouched()
    for out, work in sends:
        work.wait()
        out.assert_untouched()

    # The first of a tag comes first; a later tag may overtake.
    for tag, value in ((1, 1.0), (2, 2.0), (1, 3.0)):
        dist.isend(torch.tensor([value]), right, tag=tag)
    arrived = torch.empty(1)
    for tag, value in ((2, 2.0), (1, 1.0), (1, 3.0)):
        assert dist.recv(arrived, left, tag=tag) == left
        assert arrived.item() == value

    # From any source, some waiting here already: each exactly once.
    dist.barrier()
    if rank == 0:
        seen = []
        for turn in range(2 * (size - 1)):
            if turn == size - 1:
                dist.barrier()
            source = dist.recv(arrived)
            seen.append((source, arrived.item()))
        expected = [(r, 10.0 * r + n) for r in range(1, size) for n in (0, 1)]
        assert sorted(seen) == expected
    else:
        dist.send(torch.tensor([10.0 * rank]), 0)
        dist.barrier()
        dist.send(torch.tensor([10.0 * rank + 1]), 0)
    # All-to-all at once, a collective in between.
    peers = [peer for peer in range(size) if peer != rank]
    works = [dist.isend(torch.full((90_000,), 1.0 * rank), p, tag=5) for p in peers]
    total = torch.ones(1)
    dist.all_reduce(total)
    big = torch.empty(90_000)
    for peer in peers:
        dist.recv(big, peer, tag=5)
        assert big[0] == big[-1] == peer
    for work in works:
        work.wait()
    out, into = (dist.isend, total, right), (dist.irecv, arrived, left)
    for work in dist.batch_isend_irecv([dist.P2POp(*out), dist.P2POp(*into)]):
        work.wait()
    assert arrived.item() == size


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.verifies(
    *COLLECTIVE,
    "xtrain.backends.messages:Inbox",
    "xtrain.backends.messages:send_message",
    "xtrain.backends.segments:Channel",
    "xtrain.backends.works:Pending",
    "xtrain.comm.reduce_op:reduce_into",
)
def test_messages(ours, size):
    ours(size).run(messages)


# ---------------------------------------------------------------------------- in place


def into_its_own_piece(numel: int) -> None:
    """The output is a part of the input, or the input of the output."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(numel * size).mul_(rank + 1)
    pieces = list(whole.clone().chunk(size))
    mine = whole.chunk(size)[rank]
    dist.reduce_scatter_tensor(mine, whole)
    total = torch.arange(numel * size).mul_(size * (size + 1) // 2)
    assert torch.equal(mine, total.chunk(size)[rank])
    dist.reduce_scatter(pieces[rank], pieces)
    assert torch.equal(pieces[rank], total.chunk(size)[rank])
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole, total)


@and_under_nccl_rules
@pytest.mark.verifies(*COLLECTIVE, "xtrain.comm.reduce_op:reduce_into")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("numel", [5, 600_000])
def test_in_place(ours, size, numel):
    ours(size).run(into_its_own_piece, numel)


# -------------------------------------------------------------------------- bad input


def bad_input() -> None:
    size = dist.get_world_size()
    right, one = (dist.get_rank() + 1) % size, torch.ones(1)
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    even, odd, twice = torch.ones(size), torch.ones(size + 1), torch.ones(2 * size)
    refused = {
        "dense CPU": lambda: dist.all_reduce(torch.eye(2).to_sparse()),
        "resolve_conj": lambda: dist.group.WORLD.send([lazy], right, 0),
        "rows do not divide": lambda: dist.all_to_all_single(odd, odd.clone()),
        "must hold 3 times": lambda: dist.all_gather_into_tensor(twice, one),
        "for its": lambda: dist.all_gather([torch.ones(2)] * size, torch.ones(3)),
        "dtype": lambda: dist.all_to_all_single(even, even.int()),
    }
    for rule, call in refused.items():
        with pytest.raises(ValueError, match=rule):
            call()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


@pytest.mark.verifies(*COLLECTIVE, "xtrain.comm.reduce_op:reduce_into")
def test_bad_input_is_refused_before_anything_is_sent(ours):
    ours(3).run(bad_input)


def gloo_too(backend: str) -> None:
    """A group of ours beside one of gloo's."""
    other = dist.new_group(backend=backend, timeout=timedelta(seconds=20))
    total = torch.ones(5)
    dist.all_reduce(total, group=other)
    dist.all_reduce(total)
    assert total[0].item() == dist.get_world_size() ** 2


@and_under_nccl_rules
@pytest.mark.verifies(*COLLECTIVE, "xtrain.comm.reduce_op:reduce_into")
def test_beside_gloo(ours):
    ours(2).run(gloo_too, "gloo")
