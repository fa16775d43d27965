"""The formulas of `collective_traffic` against what the real code really sends.

Every collective runs on real processes under a `CommLedger`; the bytes that each
rank sent and received must equal the formula, rank by rank and to the last byte.
"""

import pytest
import torch
import torch.distributed as dist

from xtrain import comm
from xtrain.plan import collective_traffic
from xtrain.plan.collective_traffic import hierarchical_between_nodes

NUMELS = (1, 7, 64, 257)
ITEMSIZE = torch.float32.itemsize


def run_collective(name: str, numel: int, root: int) -> None:
    """Run the collective called `name` on a full tensor of `numel` elements."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = numel // size if name in ("gather", "scatter", "ring_all_gather") else numel
    tensor = torch.full((share,), float(rank))
    mine = [torch.zeros(share) for _ in range(size)] if rank == root else None
    if name in ("broadcast", "broadcast_naive", "reduce"):
        getattr(comm, name)(tensor, root)
    elif name == "gather":
        comm.gather(tensor, mine, dst=root)
    elif name == "scatter":
        comm.scatter(tensor, mine, src=root)
    elif name == "ring_all_gather":
        comm.ring_all_gather(torch.empty(numel), tensor)
    elif name == "ring_reduce_scatter":
        comm.ring_reduce_scatter(torch.empty(numel // size), tensor)
    elif name == "all_to_all":
        comm.all_to_all_single(torch.empty_like(tensor), tensor)
    elif name == "barrier":
        comm.barrier()
    else:
        getattr(comm, name)(tensor)


def measure(name: str, numel: int, root: int):
    with comm.CommLedger() as ledger:
        run_collective(name, numel, root)
    return ledger.bytes_sent, ledger.bytes_received, ledger.events


def check(worlds, name: str, size: int, numel: int, **options):
    root = options.get("root", 0)
    results = worlds(size).run(measure, name, numel, root)
    formula = collective_traffic(name, numel, size, **options).bytes(ITEMSIZE)
    assert tuple(sent for sent, _, _ in results) == formula.sent
    assert tuple(received for _, received, _ in results) == formula.received
    if numel >= size:
        rounds = comm.message_rounds([events for _, _, events in results])
        assert len(rounds) == formula.rounds or size == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    "name",
    [
        "ring_all_reduce",
        "tree_all_reduce",
        "halving_doubling_all_reduce",
        "parameter_server_all_reduce",
    ],
)
def test_all_reduce_sends_the_formula(world, name, size):
    for numel in NUMELS:
        check(world, name, size, numel)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "name", ["broadcast", "broadcast_naive", "reduce", "gather", "scatter"]
)
def test_rooted_collectives_send_the_formula(world, name, size):
    numel = 13 * size if name in ("gather", "scatter") else 13
    for root in {0, size - 1}:
        check(world, name, size, numel, root=root)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "name", ["ring_all_gather", "ring_reduce_scatter", "all_to_all", "barrier"]
)
def test_even_collectives_send_the_formula(world, name, size):
    check(world, name, size, 1 if name == "barrier" else 5 * size)


def measure_uneven_all_to_all(table):
    rank = dist.get_rank()
    rows = table[rank]
    arriving = [row[rank] for row in table]
    with comm.CommLedger() as ledger:
        comm.all_to_all_single(
            torch.empty(sum(arriving)), torch.ones(sum(rows)), arriving, rows
        )
    return ledger.bytes_sent, ledger.bytes_received


def test_uneven_all_to_all_sends_the_formula(world):
    table = [[2, 0, 1, 5], [3, 2, 2, 0], [0, 0, 0, 1], [4, 1, 0, 0]]
    results = world(4).run(measure_uneven_all_to_all, table)
    formula = collective_traffic("all_to_all", 0, 4, splits=table).bytes(ITEMSIZE)
    assert tuple(sent for sent, _ in results) == formula.sent
    assert tuple(received for _, received in results) == formula.received


def measure_hierarchical(numel, local_ranks):
    rank, size = dist.get_rank(), dist.get_world_size()
    nodes = torch.arange(size).view(-1, local_ranks)
    intra = [dist.new_group(row.tolist()) for row in nodes]
    inter = [dist.new_group(column.tolist()) for column in nodes.T]
    node, local = divmod(rank, local_ranks)
    with comm.CommLedger() as ledger:
        comm.hierarchical_all_reduce(
            torch.ones(numel), intra_group=intra[node], inter_group=inter[local]
        )
    leaving = sum(
        event.nbytes
        for event in ledger.events
        if event.kind == "send" and event.peer // local_ranks != node
    )
    return ledger.bytes_sent, ledger.bytes_received, leaving


@pytest.mark.parametrize(("size", "local"), [(4, 2), (6, 3), (8, 4)])
@pytest.mark.parametrize("numel", [7, 48])
def test_hierarchical_sends_the_formula(world, size, local, numel):
    results = world(size).run(measure_hierarchical, numel, local)
    formula = collective_traffic(
        "hierarchical_all_reduce", numel, size, local_ranks=local
    ).bytes(ITEMSIZE)
    across = hierarchical_between_nodes(numel, size, local).bytes(ITEMSIZE)
    assert tuple(sent for sent, _, _ in results) == formula.sent
    assert tuple(received for _, received, _ in results) == formula.received
    assert tuple(leaving for _, _, leaving in results) == across.sent
