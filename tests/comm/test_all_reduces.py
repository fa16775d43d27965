"""Each all-reduce against one process: every operation, dtype, shape and layout."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from tests.comm.reference import (
    ARITHMETIC,
    FLOATS,
    INTS,
    assert_reduced,
    assert_same_on_all_ranks,
    check_all_reduce,
    check_all_reduce_extras,
    input_of,
    legal,
)
from xtrain import comm
from xtrain.comm.collectives import TREE_MAX_BYTES

SYMBOLS = [
    "xtrain.comm.collectives:all_reduce",
    "xtrain.comm.ring:ring_all_reduce",
    "xtrain.comm.tree:tree_all_reduce",
    "xtrain.comm.tree:halving_doubling_all_reduce",
    "xtrain.comm.parameter_server:parameter_server_all_reduce",
    "xtrain.comm.one_shot:one_shot_all_reduce",
]
NAMES = [symbol.partition(":")[2] for symbol in SYMBOLS]
SIZES = dict.fromkeys(NAMES, (1, 2, 3, 4)) | {
    "ring_all_reduce": (1, 2, 3, 4, 8),
    "tree_all_reduce": (1, 2, 3, 4, 5, 6, 8),
    "halving_doubling_all_reduce": (1, 2, 3, 4, 5, 6, 8),
}


def against_one_process(name: str) -> None:
    all_reduce = getattr(comm, name)
    check_all_reduce(all_reduce)
    check_all_reduce_extras(all_reduce)


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name in NAMES for size in SIZES[name]],
)
@pytest.mark.verifies(*SYMBOLS, "xtrain.comm.tree:_halve_and_double")
def test_equals_one_process(world, name, size):
    world(size).run(against_one_process, name)


def around_the_limit_of_the_tree() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in (TREE_MAX_BYTES // 4, TREE_MAX_BYTES // 4 + 1):
        inputs = [input_of(r, (numel,), torch.float32) for r in range(size)]
        mine = inputs[rank].clone()
        with comm.CommLedger() as ledger:
            comm.all_reduce(mine)
        assert_reduced(mine, inputs, ReduceOp.SUM)
        if size == 4:
            # The tree's root sends the tensor twice, a ring's rank 1.5 times.
            tree = numel * 4 <= TREE_MAX_BYTES
            assert (ledger.messages == 6) != tree


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies("xtrain.comm.collectives:all_reduce")
def test_small_tensors_take_the_tree_and_large_ones_the_ring(world, size):
    world(size).run(around_the_limit_of_the_tree)


def any_all_reduce(name: str, numel: int, op, dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [input_of(r, (numel,), dtype, numel) for r in range(size)]
    mine = inputs[rank].clone()
    getattr(comm, name)(mine, op)
    assert_reduced(mine, inputs, op, (name, numel, op, dtype))
    assert_same_on_all_ranks(mine)


NUMELS = st.integers(0, 300)
OPS_AND_DTYPES = st.sampled_from(
    [(op, dtype) for op in ARITHMETIC for dtype in FLOATS + INTS if legal(op, dtype)]
)


@pytest.mark.verifies(*SYMBOLS)
def test_any_size_any_number_of_ranks(world):
    @settings(max_examples=40, derandomize=True, deadline=None, database=None)
    @given(
        st.sampled_from(NAMES), st.integers(1, 4), st.integers(0, 300), OPS_AND_DTYPES
    )
    def check(name, size, numel, op_and_dtype):
        world(size).run(any_all_reduce, name, numel, *op_and_dtype)

    check()
