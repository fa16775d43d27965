"""Combining two partial results, or the shares of several ranks."""

import itertools

import pytest
import torch
from torch.distributed import ReduceOp

from tests.comm.reference import (
    ARITHMETIC,
    BITS,
    FLOATS,
    INTS,
    assert_reduced,
    input_of,
    legal,
)
from xtrain.comm.reduce_op import (
    BITWISE,
    COMBINE,
    divide_if_average,
    fold_into,
    reduce_into,
)

LEGAL = [
    pair for pair in itertools.product(ARITHMETIC + BITS, FLOATS + INTS) if legal(*pair)
]


@pytest.mark.verifies(
    "xtrain.comm.reduce_op:fold_into", "xtrain.comm.reduce_op:divide_if_average"
)
def test_combining_in_turn_is_the_reduction():
    for (op, dtype), ranks in itertools.product(LEGAL, (1, 2, 5)):
        inputs = [input_of(rank, (3, 4), dtype) for rank in range(ranks)]
        partial, kept = inputs[0].clone(), inputs[-1].clone()
        for incoming in inputs[1:]:
            assert fold_into(partial, incoming, op) is None
        assert divide_if_average(partial, op, ranks) is None
        assert_reduced(partial, inputs, op, (op, dtype, ranks))
        assert torch.equal(inputs[-1], kept)
    assert set(COMBINE) == {*ARITHMETIC, *BITS}
    assert set(BITWISE) == set(BITS)


@pytest.mark.verifies("xtrain.comm.reduce_op:divide_if_average")
def test_only_an_average_is_divided():
    for op in ARITHMETIC + BITS:
        tensor = torch.full((2,), 6.0 if op not in BITS else 6)
        if op in BITS:
            tensor = tensor.long()
        divide_if_average(tensor, op, 3)
        assert tensor.tolist() == ([2, 2] if op == ReduceOp.AVG else [6, 6])


@pytest.mark.verifies("xtrain.comm.reduce_op:reduce_into")
def test_shares_are_reduced_into_any_output():
    """One share or many; the output new, or the first of the shares."""
    for (op, dtype), ranks in itertools.product(LEGAL, (1, 2, 3, 5)):
        inputs = [input_of(rank, (3, 4), dtype) for rank in range(ranks)]
        for inside in (False, True):
            shares = [share.clone() for share in inputs]
            output = shares[0] if inside else torch.ones_like(shares[0])
            assert reduce_into(output, shares, op) is None
            assert_reduced(output, inputs, op, (op, dtype, ranks, inside))
            assert all(map(torch.equal, shares[inside:], inputs[inside:]))


@pytest.mark.verifies("xtrain.comm.reduce_op:reduce_into")
def test_shares_add_up_in_their_order_and_16_bit_ones_in_fp32():
    for dtype in FLOATS:
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            for ranks in (1, 2, 3, 5):
                shares = [input_of(rank, (100,), dtype, 3) for rank in range(ranks)]
                expected = shares[0].to(wide)
                for share in shares[1:]:
                    expected = expected + share.to(wide)
                if op == ReduceOp.AVG:
                    expected = expected / ranks
                output = torch.empty_like(shares[0])
                reduce_into(output, shares, op)
                assert torch.equal(output, expected.to(dtype)), (dtype, op, ranks)

    # 256 + 1 is no bf16 number: added one by one in 16 bits, the ones would be lost.
    shares = [torch.full((2,), value) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    for dtype, large in ((torch.bfloat16, 1), (torch.float16, 8)):
        output = torch.empty(2, dtype=dtype)
        narrow = [shares[0].to(dtype) * large, *(s.to(dtype) for s in shares[1:])]
        reduce_into(output, narrow, ReduceOp.SUM)
        assert output.tolist() == [256.0 * large + 4] * 2
        reduce_into(output, [narrow[0], narrow[0]], ReduceOp.AVG)
        assert output.tolist() == [256.0 * large] * 2
