"""All-reduce over the two axes of a mesh."""

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
    SHAPES,
    Laid,
    SameEverywhere,
    assert_reduced,
    input_of,
    legal,
)
from xtrain.comm import (
    CommLedger,
    hierarchical_all_reduce,
    init_mesh,
    message_rounds,
    ring_all_reduce,
)
from xtrain.plan import collective_traffic
from xtrain.plan.collective_traffic import hierarchical_between_nodes

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (4, 2)]


def groups(shape):
    mesh = init_mesh(shape, ("node", "local"))
    return mesh["local"].get_group(), mesh["node"].get_group()


def all_cases(
    shape,
    hierarchical_all_reduce=hierarchical_all_reduce,
    ops=ARITHMETIC + BITS,
    layouts=LAYOUTS,
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    intra, inter = groups(shape)
    same = SameEverywhere()
    pairs = itertools.product(ops, FLOATS + INTS)
    for case, (op, dtype) in enumerate(p for p in pairs if legal(*p)):
        dims = SHAPES[case % len(SHAPES)]
        layout = layouts[case // 2 % len(layouts)]
        inputs = [input_of(r, dims, dtype, case) for r in range(size)]
        mine = Laid(inputs[rank], layout)
        hierarchical_all_reduce(mine.tensor, op, intra, inter)
        assert_reduced(mine.tensor, inputs, op, (op, dtype, dims, layout))
        mine.assert_surroundings_untouched()
        same.add(mine.tensor)
        if not dtype.is_floating_point:
            flat = inputs[rank].clone()
            ring_all_reduce(flat, op)
            assert torch.equal(flat, mine.tensor)
    same.check()
    parameter = torch.nn.Parameter(torch.full((5,), float(rank)))
    hierarchical_all_reduce(parameter, intra_group=intra, inter_group=inter)
    assert parameter.tolist() == [size * (size - 1) / 2] * 5
    assert parameter.is_leaf
    # The axes may change places: only the traffic differs.
    tensor = torch.full((7,), float(rank))
    hierarchical_all_reduce(tensor, ReduceOp.AVG, inter, intra)
    assert tensor.tolist() == [(size - 1) / 2] * 7


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.verifies("xtrain.comm.hierarchical:hierarchical_all_reduce")
def test_equals_one_process(world, shape):
    world(shape[0] * shape[1]).run(all_cases, shape)


def traffic(shape, numels):
    rank = dist.get_rank()
    intra, inter = groups(shape)
    results = []
    for numel in numels:
        with CommLedger() as ledger:
            hierarchical_all_reduce(torch.ones(numel), ReduceOp.SUM, intra, inter)
        leaving = sum(
            event.nbytes
            for event in ledger.events
            if event.kind == "send" and event.peer // shape[1] != rank // shape[1]
        )
        results.append(
            (ledger.bytes_sent, ledger.bytes_received, leaving, ledger.events)
        )
    return results


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (4, 2)], ids=str)
@pytest.mark.verifies("xtrain.comm.hierarchical:hierarchical_all_reduce")
def test_slow_links_carry_a_share(world, shape):
    size, local = shape[0] * shape[1], shape[1]
    numels = (1, 7, 48, 97)
    by_rank = world(size).run(traffic, shape, numels)
    for case, numel in enumerate(numels):
        plan = collective_traffic(
            "hierarchical_all_reduce", numel, size, local_ranks=local
        ).bytes(4)
        across = hierarchical_between_nodes(numel, size, local).bytes(4)
        sent, received, leaving, events = zip(
            *(results[case] for results in by_rank), strict=True
        )
        assert sent == plan.sent
        assert received == plan.received
        assert leaving == across.sent
        if numel >= size:
            assert len(message_rounds(list(events))) == plan.rounds
