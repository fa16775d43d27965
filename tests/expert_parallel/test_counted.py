"""What an expert-parallel layer sends: the bytes of the routing table, no more."""

import pytest
import torch
import torch.distributed as dist

from tests.expert_parallel.moe_cases import (
    EXPERTS,
    HIDDEN,
    Case,
    case_of,
    sharded,
    truth_of,
)
from tests.expert_parallel.reference import Rules
from tests.expert_parallel.test_dispatch import on_device
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import DIRECT
from xtrain.expert_parallel import Routing, combine, dispatch, plan_dispatch
from xtrain.plan import all_to_all_bytes, routed_bytes

MODULE = "xtrain.expert_parallel.dispatch"
WAY = [f"{MODULE}:dispatch", f"{MODULE}:combine", f"{MODULE}:plan_dispatch"]
LAYER = "xtrain.expert_parallel.gshard:GShardMoE"
PHASES = ("dispatch", "combine", "backward of combine", "backward of dispatch")


def to_each(ledger: CommLedger, size: int) -> list[int]:
    """Bytes that were sent to each rank of the world."""
    found = [0] * size
    for event in ledger.events:
        if event.kind == "send":
            found[event.peer] += event.nbytes
    return found


def phases(case: Case, dtype: torch.dtype) -> tuple[list[int], dict[str, list[int]]]:
    """Bytes to each rank: of the counts, and of the four all-to-alls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = sharded(case)
    mask = None if case.mask is None else case.mask[rank]
    routing = layer.router(case.x[rank], mask)
    with CommLedger() as counting:
        plan = plan_dispatch(routing, collectives=DIRECT)
    x = case.x[rank].to(dtype).requires_grad_()
    with CommLedger() as forth:
        rows = dispatch(x, plan)
    cut = rows.detach().requires_grad_()  # a graph for each way
    with CommLedger() as back:
        y = combine(cut, routing.gates_Tk.detach(), plan)
    with CommLedger() as back_of_combine:
        y.sum().backward()
    with CommLedger() as back_of_dispatch:
        rows.sum().backward()
    ledgers = forth, back, back_of_combine, back_of_dispatch
    assert all(event.kind != "collective" for one in ledgers for event in one.events)
    return to_each(counting, size), {
        phase: to_each(ledger, size)
        for phase, ledger in zip(PHASES, ledgers, strict=True)
    }


def table_of(case: Case, ranks: int) -> list[list[int]]:
    """Copies from each rank to each, from the choices of the dense layer."""
    local = len(case.made["router"]) // ranks
    return [
        [sum(e // local == to for row in mine for e in row) for to in range(ranks)]
        for mine in truth_of(case).chosen
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.verifies(*WAY, "xtrain.plan.experts:routed_bytes")
def test_each_all_to_all_sends_the_bytes_of_the_routing_table(world, ranks, dtype):
    cases = [
        case_of("ragged", Rules(3), [5, 0, 3, 7, 1, 4, 0, 2][:ranks]),
        case_of("tight", Rules(2, capacity_factor=0.5), [6] * ranks, masked=True),
    ]
    for case in cases:
        copies = table_of(case, ranks)
        by_rank = world(ranks).run(phases, case, dtype)
        for rank, (counts, found) in enumerate(by_rank):
            row = HIDDEN * dtype.itemsize
            out = [n * row * (to != rank) for to, n in enumerate(copies[rank])]
            back = [line[rank] * row * (to != rank) for to, line in enumerate(copies)]
            turned = list(zip(*copies, strict=True))
            for bytes_to_each, table in ((out, copies), (back, turned)):
                planned = routed_bytes(table, HIDDEN, itemsize=dtype.itemsize)
                assert sum(bytes_to_each) == planned[rank]
            assert found == {
                "dispatch": out,
                "combine": back,
                "backward of combine": out,
                "backward of dispatch": back,
            }, case.name
            # The numbers of copies: one of 8 bytes for each expert of another rank.
            local = EXPERTS // ranks
            assert counts == [8 * local * (to != rank) for to in range(ranks)]
            if case.name == "tight":
                assert sum(copies[rank]) < int(case.mask[rank].sum()) * 2, (
                    "some dropped"
                )


def uniform(tokens: int, top_k: int, dtype: torch.dtype) -> list[int]:
    """Bytes per all-to-all of tokens that choose all experts equally often."""
    size = dist.get_world_size()
    with torch.device("cpu"):
        experts = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % EXPERTS
        even = torch.full((tokens, EXPERTS), 1 / EXPERTS)
        gates = torch.full((tokens, top_k), 1 / top_k, dtype=dtype)
        kept = torch.ones_like(experts, dtype=torch.bool)
    routing = on_device(Routing(experts, gates, even, even.log(), kept))
    plan = plan_dispatch(routing, collectives=DIRECT)
    x = torch.ones(tokens, HIDDEN, dtype=dtype, requires_grad=True)
    found = []
    with CommLedger() as ledger:
        rows = dispatch(x, plan)
        found.append(ledger.bytes_sent)
        y = combine(rows, routing.gates_Tk, plan)
        found.append(ledger.bytes_sent - found[0])
        y.sum().backward()
    assert len(to_each(ledger, size)) == size
    return [*found, ledger.bytes_sent - sum(found)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.verifies(*WAY, "xtrain.plan.experts:all_to_all_bytes")
def test_uniform_routing_sends_k_h_bytes_and_the_share_of_the_others(world, ranks):
    tokens = 2 * EXPERTS
    for top_k, dtype in ((1, torch.float32), (3, torch.bfloat16), (8, torch.float64)):
        per_token = top_k * HIDDEN * dtype.itemsize * (ranks - 1) / ranks
        for found in world(ranks).run(uniform, tokens, top_k, dtype):
            one = tokens * per_token
            sizes = tokens, top_k, HIDDEN, ranks
            assert all_to_all_bytes(*sizes, itemsize=dtype.itemsize) == one
            assert found == [one, one, 2 * one]


def of_the_layer(case: Case) -> tuple[list[int], list[int], list[str]]:
    """Bytes of forward and backward to each rank; collectives besides."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = sharded(case)
    x = case.x[rank].clone().requires_grad_()
    with CommLedger() as forward:
        y = layer(x)
    with CommLedger() as backward:
        y.sum().backward()
    collectives = [
        event.op for one in (forward, backward) for event in one.events
        if event.kind == "collective"
    ]  # fmt: skip
    return to_each(forward, size), to_each(backward, size), collectives


@pytest.mark.verifies(LAYER)
def test_a_layer_sends_the_counts_and_four_times_its_rows(world):
    ranks = 4
    case = case_of("layer", Rules(2), [5, 0, 3, 7], shared=7, collectives="direct")
    copies, row = table_of(case, ranks), HIDDEN * 8
    for rank, found in enumerate(world(ranks).run(of_the_layer, case)):
        forward, backward, collectives = found
        rows = [(copies[rank][to] + copies[to][rank]) * (to != rank) for to in range(4)]
        assert backward == [n * row for n in rows]
        assert forward == [n * row + 16 * (to != rank) for to, n in enumerate(rows)]
        # Whether all ranks make the same call, and on a CPU only.
        on_cpu = torch.get_default_device().type == "cpu"
        assert set(collectives) <= {"allreduce"} and len(collectives) <= on_cpu


def payloads(case: Case) -> list[tuple[str, int]]:
    """Torch's own all-to-alls: what each one received, its own rows too."""
    rank, layer = dist.get_rank(), sharded(case)
    x = case.x[rank].clone().requires_grad_()
    with CommLedger() as ledger:
        layer(x).sum().backward()
    return [(e.op, e.payload) for e in ledger.events if e.op.startswith("alltoall")]


@pytest.mark.verifies(LAYER)
def test_torchs_all_to_alls_are_five_and_carry_the_same_rows(world):
    ranks = 4
    case = case_of("torch's", Rules(2), [5, 0, 3, 7])
    copies, row = table_of(case, ranks), HIDDEN * 8
    for rank, found in enumerate(world(ranks).run(payloads, case)):
        mine, others = sum(copies[rank]) * row, sum(c[rank] for c in copies) * row
        sizes = [EXPERTS * 8, others, mine, others, mine]
        assert [payload for _, payload in found] == sizes
