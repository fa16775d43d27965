"""Logarithmic algorithms: binomial tree, halving and doubling."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm.reference import FLOATS, INTS, assert_reduced, input_of
from xtrain.comm import (
    CommLedger,
    halving_doubling_all_reduce,
    message_rounds,
    tree_all_reduce,
)
from xtrain.comm.tree import tree_broadcast, tree_reduce
from xtrain.plan import collective_traffic

SIZES = [1, 2, 3, 4, 5, 8]


def every_root() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        for dtype in FLOATS + INTS:
            for numel in (0, 1, 7):
                inputs = [input_of(r, (numel,), dtype, root) for r in range(size)]
                flat = inputs[rank].clone()
                tree_broadcast(flat, root)
                assert torch.equal(flat, inputs[root])
                flat = inputs[rank].clone()
                tree_reduce(flat, root, ReduceOp.SUM)
                if rank == root:
                    assert_reduced(flat, inputs, ReduceOp.SUM)
        flat = torch.full((3,), float(rank))
        tree_reduce(flat, root, ReduceOp.AVG)
        if rank == root:
            assert torch.equal(flat, torch.full((3,), (size - 1) / 2))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.verifies("xtrain.comm.tree:tree_broadcast", "xtrain.comm.tree:tree_reduce")
def test_trees_from_and_to_every_root(world, size):
    world(size).run(every_root)


def trace(function, *args):
    with CommLedger() as ledger:
        function(*args)
    return ledger.events


def trace_tree(name, root):
    flat = torch.ones(12)
    if name == "broadcast":
        return trace(tree_broadcast, flat, root)
    return trace(tree_reduce, flat, root, ReduceOp.SUM)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.verifies("xtrain.comm.tree:tree_broadcast", "xtrain.comm.tree:tree_reduce")
def test_a_tree_has_as_many_rounds_as_doublings(world, size):
    for name in ("broadcast", "reduce"):
        for root in {0, size // 2, size - 1}:
            rounds = message_rounds(world(size).run(trace_tree, name, root))
            assert len(rounds) == (size - 1).bit_length()
            assert sum(map(len, rounds)) == size - 1
            reached = {root}
            for messages in rounds if name == "broadcast" else rounds[::-1]:
                known = set(reached)
                for message in messages:
                    giver, taker = message.src, message.dst
                    if name == "reduce":
                        giver, taker = taker, giver
                    assert giver in known
                    assert taker not in reached
                    reached.add(taker)
            assert reached == set(range(size))


def trace_all_reduce(all_reduce, numel):
    return trace(all_reduce, torch.ones(numel))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8])
@pytest.mark.verifies(
    "xtrain.comm.tree:tree_all_reduce", "xtrain.comm.tree:halving_doubling_all_reduce"
)
def test_rounds_and_bytes_are_the_formulas(world, size):
    for all_reduce in (tree_all_reduce, halving_doubling_all_reduce):
        for numel in (8, 29):
            events = world(size).run(trace_all_reduce, all_reduce, numel)
            plan = collective_traffic(all_reduce.__name__, numel, size).bytes(4)
            assert len(message_rounds(events)) == plan.rounds
            for rank, mine in enumerate(events):
                sent = sum(e.nbytes for e in mine if e.kind == "send")
                received = sum(e.nbytes for e in mine if e.kind == "recv")
                assert (sent, received) == (plan.sent[rank], plan.received[rank])
