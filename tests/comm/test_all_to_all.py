"""All-to-all: lists, one tensor, uneven splits, and the asynchronous forms."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.reference import FLOATS, INTS, LAYOUTS, Laid, input_of
from xtrain.comm import (
    CommLedger,
    all_to_all,
    all_to_all_async,
    all_to_all_single,
    all_to_all_single_async,
    exchange_split_sizes,
)

DTYPES = FLOATS + INTS
# table[src][dst] rows; zeros on and off the diagonal, one rank that gets nothing
TABLES = {
    1: [[3]],
    2: [[0, 5], [2, 0]],
    3: [[1, 0, 4], [2, 0, 0], [0, 0, 3]],
    4: [[2, 0, 1, 5], [3, 2, 0, 0], [0, 0, 0, 1], [4, 1, 0, 0]],
    8: [[(3 * src + 5 * dst) % 4 for dst in range(8)] for src in range(8)],
}


def list_twin(outputs, inputs) -> None:
    """torch's list form, which gloo has from torch 2.12 on; before, its single form."""
    if dist.get_backend() != "gloo" or torch.__version__ >= (2, 12):
        dist.all_to_all(outputs, inputs)
        return
    arriving = [output.numel() for output in outputs]
    received = inputs[0].new_empty(sum(arriving))
    leaving = [piece.numel() for piece in inputs]
    dist.all_to_all_single(received, torch.cat(inputs), arriving, leaving)
    for output, piece in zip(outputs, received.split(arriving), strict=True):
        output.copy_(piece)


def list_cases(run) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for case, dtype in enumerate(DTYPES * 2):
        # Shapes differ from pair to pair; some are empty, some have no dimension.
        uneven = case < len(DTYPES)
        shapes = [
            [
                ((), (0,), (3,), (2, 3))[(uneven * (src + 2 * dst) + case) % 4]
                for dst in range(size)
            ]
            for src in range(size)
        ]
        table = [
            [
                input_of(10 * src + dst, shapes[src][dst], dtype, case)
                for dst in range(size)
            ]
            for src in range(size)
        ]
        inputs = [Laid(t, LAYOUTS[(case + i) % 4]) for i, t in enumerate(table[rank])]
        outputs = [
            Laid(torch.ones_like(table[src][rank]), LAYOUTS[(case // 2 + src) % 4])
            for src in range(size)
        ]
        result = run([o.tensor for o in outputs], [i.tensor for i in inputs])
        if result is not None:
            result.wait()
        for src in range(size):
            assert torch.equal(outputs[src].tensor, table[src][rank])
            outputs[src].assert_surroundings_untouched()
            inputs[src].assert_untouched()
        if uneven:  # gloo's own wants pieces of one size
            continue
        flat = [t.reshape(-1) for t in table[rank]]
        twins = [torch.ones(t[rank].numel(), dtype=dtype) for t in table]
        list_twin(twins, flat)
        for twin, output in zip(twins, outputs, strict=True):
            assert torch.equal(twin, output.tensor.reshape(-1))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies(
    "xtrain.comm.all_to_all:all_to_all",
    "xtrain.comm.all_to_all:all_to_all_async",
    "xtrain.comm.work:Work",
)
def test_list_form_equals_torch(world, size):
    for run in (all_to_all, all_to_all_async):
        world(size).run(list_cases, run)


def single_cases(run, table, layouts=LAYOUTS) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = table[rank]
    arriving = [line[rank] for line in table]
    assert exchange_split_sizes(rows) == arriving
    cases = list(itertools.product(((), (3,), (2, 1, 2)), layouts))
    for case, (shape, layout) in enumerate(cases * 2):
        dtype = DTYPES[case % len(DTYPES)]
        everyone = [
            input_of(r, (sum(table[r]), *shape), dtype, case) for r in range(size)
        ]
        mine = Laid(everyone[rank], layout)
        output = Laid(
            torch.ones(sum(arriving), *shape, dtype=dtype),
            layouts[case // len(layouts) % len(layouts)],
        )
        result = run(output.tensor, mine.tensor, arriving, rows)
        if result is not None:
            result.wait()
        pieces = [t.split(table[r])[rank] for r, t in enumerate(everyone)]
        assert torch.equal(output.tensor, torch.cat(pieces)), (shape, layout, dtype)
        mine.assert_untouched()
        output.assert_surroundings_untouched()
        twin = torch.ones(sum(arriving), *shape, dtype=dtype)
        dist.all_to_all_single(twin, everyone[rank], arriving, rows)
        assert torch.equal(output.tensor, twin)

        # The way back swaps the two lists of sizes.
        back = torch.empty_like(everyone[rank])
        result = run(back, output.tensor, rows, arriving)
        if result is not None:
            result.wait()
        assert torch.equal(back, everyone[rank])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.verifies(
    "xtrain.comm.all_to_all:all_to_all_single",
    "xtrain.comm.all_to_all:all_to_all_single_async",
    "xtrain.comm.all_to_all:exchange_split_sizes",
    "xtrain.comm.work:Work",
)
def test_single_form_equals_torch(world, size):
    for run in (all_to_all_single, all_to_all_single_async):
        world(size).run(single_cases, run, TABLES[size])


def even_and_one_sided(all_to_all_single=all_to_all_single) -> None:
    """Sizes may be left out on either side; no rows at all is legal too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    input = torch.arange(2.0 * size) + 100 * rank
    expected = torch.cat(
        [torch.tensor([2.0 * rank, 2.0 * rank + 1]) + 100 * r for r in range(size)]
    )
    splits = [None, [2] * size]
    for out_splits, in_splits in itertools.product(splits, splits):
        output = torch.empty(2 * size)
        all_to_all_single(output, input, out_splits, in_splits)
        assert torch.equal(output, expected)
    empty = torch.empty(0, 3)
    all_to_all_single(empty, empty.clone())
    all_to_all_single(empty, empty.clone(), [0] * size, [0] * size)

    leaf = torch.nn.Parameter(input.clone())
    output = torch.zeros(2 * size, requires_grad=True)
    all_to_all_single(output, leaf)
    assert torch.equal(output.detach(), expected)
    assert leaf.is_leaf
    assert output.is_leaf


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.verifies("xtrain.comm.all_to_all:all_to_all_single")
def test_even_splits_may_be_left_out(world, size):
    world(size).run(even_and_one_sided)


def overlapping() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    handles, outputs = [], []
    for call in range(4):
        # Nobody but the handle keeps these inputs.
        input = torch.arange(float(size)) + 10 * rank + 100 * call
        outputs.append(torch.empty(size, 2).T[0] if call == 1 else torch.empty(size))
        handles.append(all_to_all_single_async(outputs[call], input))
        del input
    for call in (2, 0, 3, 1, 0):  # any order; waiting twice is harmless
        handles[call].wait()
    for call, output in enumerate(outputs):
        expected = rank + 10 * torch.arange(float(size)) + 100 * call
        assert torch.equal(output, expected)
    kept = outputs[1].clone()
    outputs[1].zero_()
    handles[1].wait()
    assert torch.equal(outputs[1], torch.zeros(size)), "a second wait wrote again"
    assert kept.sum() > 0


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.verifies(
    "xtrain.comm.all_to_all:all_to_all_single_async", "xtrain.comm.work:Work"
)
def test_calls_overlap_and_handles_keep_buffers(world, size):
    world(size).run(overlapping)


def many_scatters() -> None:
    """All-to-all is N scatters, one from each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    table = [
        [input_of(10 * s + d, (5,), torch.float32) for d in range(size)]
        for s in range(size)
    ]
    ours = [torch.empty(5) for _ in range(size)]
    all_to_all(ours, table[rank])
    for src in range(size):
        piece = torch.empty(5)
        dist.scatter(piece, table[rank] if rank == src else None, src=src)
        assert torch.equal(piece, ours[src])


@pytest.mark.verifies("xtrain.comm.all_to_all:all_to_all")
def test_it_is_one_scatter_from_every_rank(world):
    world(4).run(many_scatters)


def exchange_table(table):
    """An uneven exchange whose receivers learn their sizes only from the senders."""
    rank = dist.get_rank()
    rows = table[rank]
    tokens = torch.cat(
        [torch.full((n, 2), 10.0 * rank + dst) for dst, n in enumerate(rows)]
    )
    arriving = exchange_split_sizes(rows)
    with CommLedger() as ledger:
        output = torch.empty(sum(arriving), 2)
        all_to_all_single(output, tokens, arriving, rows)
    return output[:, 0].tolist(), ledger.bytes_sent, ledger.messages


tables = st.integers(1, 4).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=n, max_size=n
    )
)


@pytest.mark.verifies(
    "xtrain.comm.all_to_all:all_to_all_single",
    "xtrain.comm.all_to_all:exchange_split_sizes",
)
def test_any_table_of_splits(world):
    @settings(max_examples=25, derandomize=True, deadline=None, database=None)
    @given(tables)
    def check(table):
        size = len(table)
        results = world(size).run(exchange_table, table)
        for rank, (values, sent, messages) in enumerate(results):
            assert values == [
                10.0 * src + rank
                for src in range(size)
                for _ in range(table[src][rank])
            ]
            others = [n for dst, n in enumerate(table[rank]) if dst != rank]
            assert sent == 8 * sum(others)
            assert messages == sum(n > 0 for n in others)

    check()
