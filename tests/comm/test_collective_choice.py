"""One choice of collectives: the same calls and results whoever runs them."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.testing import assert_close

from xtrain.comm.collective_choice import (
    CHOICES,
    collectives_named,
    default_collectives,
)

OPS = {
    ReduceOp.SUM: lambda stacked: stacked.sum(0),
    ReduceOp.PRODUCT: lambda stacked: stacked.prod(0),
    ReduceOp.MIN: lambda stacked: stacked.amin(0),
    ReduceOp.MAX: lambda stacked: stacked.amax(0),
    ReduceOp.AVG: lambda stacked: stacked.mean(0),
}


def whole_numbers(rank: int, numel: int) -> torch.Tensor:
    """From 1 to 5 and exact in any order, products included."""
    return (torch.arange(numel) * (rank + 3) % 5 + 1).to(torch.float64)


def reductions(choice) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    theirs = torch.stack([whole_numbers(r, 3 * size + 1) for r in range(size)])
    for op, reduce in OPS.items():
        # NCCL multiplies by 1 / size before it adds up.
        rounding = 1e-15 if op == ReduceOp.AVG else 0
        mine = theirs[rank].clone()
        choice.all_reduce(mine, op=op).wait()
        expected = reduce(theirs)
        assert_close(mine, expected, rtol=rounding, atol=0)
        piece, input = torch.empty(3).double(), theirs[rank, :-1].clone()
        choice.reduce_scatter(piece, input, op=op).wait()
        assert_close(piece, expected[3 * rank : 3 * rank + 3], rtol=rounding, atol=0)
        assert torch.equal(input, theirs[rank, :-1]), "the input changed"
    # A sum unless told.
    mine, piece = theirs[rank].clone(), torch.empty(3).double()
    choice.all_reduce(mine).wait()
    assert torch.equal(mine, theirs.sum(0))
    choice.reduce_scatter(piece, theirs[rank, :-1].clone()).wait()
    assert torch.equal(piece, theirs.sum(0)[3 * rank : 3 * rank + 3])


def exchanges(choice) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = torch.empty(2 * size)
    choice.all_gather(gathered, torch.tensor([10.0 * rank, 10.0 * rank + 1])).wait()
    assert gathered.tolist() == [10.0 * r + i for r in range(size) for i in (0, 1)]

    arriving = torch.empty(size)
    choice.all_to_all_single(arriving, torch.arange(size) + 10.0 * rank).wait()
    assert arriving.tolist() == [10.0 * r + rank for r in range(size)]

    sizes = [[(src + dst) % 3 for dst in range(size)] for src in range(size)]
    taken = [row[rank] for row in sizes]
    arriving = torch.empty(sum(taken), 2)
    leaving = torch.full((sum(sizes[rank]), 2), float(rank))
    choice.all_to_all_single(arriving, leaving, taken, sizes[rank]).wait()
    expected = [[float(src)] * 2 for src, rows in enumerate(taken) for _ in range(rows)]
    assert arriving.tolist() == expected


def several_under_way(choice) -> None:
    """Issued together, waited for in another order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((4,), float(rank + k)) for k in range(3)]
    works = [choice.all_reduce(tensor) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for k, tensor in enumerate(tensors):
        assert tensor.tolist() == [size * k + size * (size - 1) / 2] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.verifies("xtrain.comm.collective_choice:Collectives")
def test_every_choice_gives_the_same_results(world, size, choice):
    for calls in (reductions, exchanges, several_under_way):
        world(size).run(calls, choice)  # a choice travels as it is


@pytest.mark.verifies("xtrain.comm.collective_choice:collectives_named")
def test_a_choice_has_one_name():
    for name in ("torch", "ring", "direct"):
        assert collectives_named(name) is CHOICES[name]
        assert collectives_named(name).name == name
        assert pickle.loads(pickle.dumps(CHOICES[name])).name == name
    with pytest.raises(ValueError, match="'gloo' are not one of.*torch.*ring.*direct"):
        collectives_named("gloo")


def names_of_choices():
    devices = [torch.device("cpu"), torch.device("cuda")]
    names = [default_collectives(None, device).name for device in devices]
    return dist.get_backend() == "gloo", *names


@pytest.mark.verifies("xtrain.comm.collective_choice:default_collectives")
def test_only_gloo_is_spared_its_reduce_scatter(world):
    for on_gloo, on_cpu, on_gpu in world(2).run(names_of_choices):
        assert (on_cpu, on_gpu) == ("direct" if on_gloo else "torch", "torch")
