"""Everybody to everybody in one step: results, handles, bytes, bad input."""

import pytest
import torch
import torch.distributed as dist

from tests.comm.reference import input_of
from tests.devices import NCCL
from xtrain.comm import CommLedger, one_shot_all_reduce
from xtrain.comm.collective_choice import DIRECT
from xtrain.comm.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
)

SYMBOLS = [
    f"xtrain.comm.direct:direct_{name}"
    for name in ("all_gather", "all_reduce", "reduce_scatter")
]
PIECES = (0, 1, 3, 1000)


def values(rank: int, numel: int, dtype=torch.float64):
    """Whole numbers, so that sums are exact in any order."""
    return (torch.arange(numel) * (rank + 1) % 97).to(dtype)


def rounded_once(size: int, numel: int, dtype):
    """The sum over ranks. With 8 of them it is more than bf16 adds up exactly."""
    return sum(values(r, numel) for r in range(size)).to(dtype)


def results_of_one_rank() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in PIECES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int32):
            whole = size * numel
            total = rounded_once(size, whole, dtype)
            output = torch.full((numel,), 7).to(dtype)
            mine = values(rank, whole, dtype)
            direct_reduce_scatter(output, mine).wait()
            assert torch.equal(output, total.view(size, -1)[rank])
            assert torch.equal(mine, values(rank, whole, dtype)), "the input changed"

            gathered = torch.full((size, numel), 7).to(dtype)
            direct_all_gather(gathered, values(rank, numel, dtype)).wait()
            expected = torch.stack([values(r, numel, dtype) for r in range(size)])
            assert torch.equal(gathered, expected)

            summed = values(rank, numel, dtype)
            direct_all_reduce(summed).wait()
            assert torch.equal(summed, rounded_once(size, numel, dtype))


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_results_are_exact(world, size):
    world(size).run(results_of_one_rank)


def sums_in_rank_order(dtype):
    """Random numbers, whose sums depend on the order: bit for bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    inputs = [input_of(r, (size * 1000,), dtype) for r in range(size)]
    total, backwards = inputs[0].to(wide), inputs[-1].to(wide)
    for r in range(1, size):
        total = total + inputs[r].to(wide)
        backwards = backwards + inputs[size - 1 - r].to(wide)
    exact = size < 3 or dtype.itemsize == 2  # fp32 holds a few such numbers' sum
    assert exact or not torch.equal(total, backwards)

    output = torch.empty(1000, dtype=dtype)
    direct_reduce_scatter(output, inputs[rank]).wait()
    assert torch.equal(output, total.to(dtype).view(size, -1)[rank])
    for reduce in (lambda t: direct_all_reduce(t).wait(), one_shot_all_reduce):
        mine = inputs[rank].clone()
        reduce(mine)
        assert torch.equal(mine, total.to(dtype))


@pytest.mark.verifies(
    "xtrain.comm.direct:direct_all_reduce",
    "xtrain.comm.direct:direct_reduce_scatter",
    "xtrain.comm.one_shot:one_shot_all_reduce",
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_rank_order(world, size):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        world(size).run(sums_in_rank_order, dtype)


def several_at_once():
    """Calls issued together and waited for in another order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.zeros(5) for _ in range(3)]
    inputs = [values(rank + k, 5 * size, torch.float32) for k in range(3)]
    handles = [
        DIRECT.reduce_scatter(o, i, group=None)
        for o, i in zip(outputs, inputs, strict=True)
    ]
    for handle in reversed(handles):
        handle.wait()
    return outputs


def test_several_may_be_under_way(world):
    size = 4
    for rank, outputs in enumerate(world(size).run(several_at_once)):
        for k, output in enumerate(outputs):
            total = sum(values(r + k, 5 * size, torch.float32) for r in range(size))
            assert torch.equal(output, total.view(size, -1)[rank])


def beside_a_message():
    """A message of the program's own crosses a call that is under way."""
    rank = dist.get_rank()
    output, word = torch.zeros(2), torch.full((2,), 40.0 + rank)
    if rank == 0:
        handle = DIRECT.reduce_scatter(output, torch.ones(4), group=None)
        dist.send(word, 1)
    else:
        dist.recv(word, 0)
        handle = DIRECT.reduce_scatter(output, torch.ones(4), group=None)
    handle.wait()
    return word.tolist(), output.tolist()


def test_a_programs_own_messages_do_not_mix_with_them(world):
    if world(2).backend in NCCL:
        pytest.skip("NCCL knows no tags: its messages keep their order")
    for word, output in world(2).run(beside_a_message):
        assert (word, output) == ([40.0] * 2, [2.0] * 2)


def traffic():
    size = dist.get_world_size()
    counts = []
    for call in (
        lambda: direct_reduce_scatter(torch.zeros(6), torch.ones(6 * size)),
        lambda: direct_all_gather(torch.zeros(6 * size), torch.ones(6)),
        lambda: direct_all_reduce(torch.ones(6 * size - 1)),  # padded by one
    ):
        with CommLedger() as ledger:
            call().wait()
        counts.append((ledger.bytes_sent, ledger.bytes_received, ledger.messages))
    return counts


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_a_ring(world, size):
    half = (size - 1) * 6 * 4
    for counts in world(size).run(traffic):
        assert counts[:2] == [(half, half, size - 1)] * 2
        assert counts[2] == (2 * half, 2 * half, 2 * (size - 1))


def bad_calls() -> None:
    size = dist.get_world_size()
    with pytest.raises(ValueError, match="must hold 2 times"):
        direct_all_gather(torch.zeros(size * 3), torch.zeros(4))
    with pytest.raises(ValueError, match="must hold 2 times"):
        direct_reduce_scatter(torch.zeros(3), torch.zeros(size * 3 + 1))
    with pytest.raises(ValueError, match="contiguous"):
        direct_all_reduce(torch.zeros(4, 6).T)


@pytest.mark.verifies(*SYMBOLS)
def test_bad_calls_are_refused_before_anything_is_sent(world):
    world(2).run(bad_calls)
