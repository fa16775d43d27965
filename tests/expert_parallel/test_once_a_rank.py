"""A token once to each rank: everything as one process, and the bytes of that."""

import pytest
import torch
import torch.distributed as dist

from tests.expert_parallel.moe_cases import (
    HIDDEN,
    SHARED,
    Case,
    case_of,
    sharded,
    truth_of,
)
from tests.expert_parallel.reference import Rules
from tests.expert_parallel.test_counted import to_each
from tests.expert_parallel.test_gshard import EVEN, RAGGED, agreed, experts_for
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import DIRECT
from xtrain.expert_parallel import Routing, plan_placement
from xtrain.expert_parallel.dispatch import (
    dispatch,
    plan_once_a_rank,
)
from xtrain.expert_parallel.once_a_rank import once_a_rank
from xtrain.plan import nodes_visited

LAYER = "xtrain.expert_parallel.gshard:GShardMoE"
WAY = [
    "xtrain.expert_parallel.once_a_rank:once_a_rank",
    "xtrain.expert_parallel.dispatch:plan_once_a_rank",
    "xtrain.expert_parallel.dispatch:combine_sums",
    "xtrain.expert_parallel.dispatch:send_copies",
]
ONCE = {"once_a_rank": True}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.verifies(LAYER, *WAY)
def test_each_token_once_a_rank_trains_as_one_process(world, ranks):
    """Outputs, every gradient, losses, loads; ragged, dropped, padded, empty."""
    experts = experts_for(ranks)
    options = ONCE | {"experts": experts}
    cases = [
        case_of(f"k = {k}", Rules(k), RAGGED[:ranks], **options) for k in (1, 3, 8)
    ]
    tight = Rules(2, capacity_factor=0.5, renormalize=False)
    loads = [float(9 if e == 1 else 1) for e in range(experts)]
    slots = min(experts, experts // ranks + 1)
    placed = options | {"placement": plan_placement(loads, ranks, slots)}
    cases += [
        case_of("tight", tight, EVEN[:ranks], masked=True, shared=SHARED, **options),
        case_of("autograd", Rules(2), EVEN[:ranks], backward="autograd", **options),
        case_of("one rank has all", Rules(3), [0] * (ranks - 1) + [9], **options),
        case_of("no tokens", Rules(2), [0] * ranks, **options),
        case_of("placed", Rules(3), RAGGED[:ranks], **placed),
    ]
    agreed(world, ranks, cases)


def sent(case: Case, dtype: torch.dtype) -> dict[str, list[int]]:
    """Bytes to each rank: in the exchange of counts, forward, and backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = sharded(case)
    layer.experts.to(dtype)
    routing = layer.router(case.x[rank], None if case.mask is None else case.mask[rank])
    with CommLedger() as counting:
        plan_once_a_rank(routing, collectives=DIRECT)
    x = case.x[rank].to(dtype).requires_grad_()
    with CommLedger() as forward:
        y = once_a_rank(x, routing, layer.experts, collectives=DIRECT)
    with CommLedger() as backward:
        y.sum().backward()
    ledgers = {"counts": counting, "forward": forward, "backward": backward}
    return {name: to_each(ledger, size) for name, ledger in ledgers.items()}


def rows_between(case: Case, ranks: int) -> list[list[int]]:
    """How many tokens of each rank have experts on each other rank."""
    local = len(case.made["router"]) // ranks
    return [
        [
            sum(any(e // local == to for e in chosen) for chosen in mine) * (to != rank)
            for to in range(ranks)
        ]
        for rank, mine in enumerate(truth_of(case).chosen)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.verifies(*WAY)
def test_it_sends_a_row_for_each_rank_that_a_token_reaches(world, ranks, dtype):
    """With k numbers and k gates there; with k gradients of gates back."""
    for case in (
        case_of("ragged", Rules(3), RAGGED[:ranks], **ONCE),
        case_of("tight", Rules(2, capacity_factor=0.5), EVEN[:ranks], masked=True,
                **ONCE),
    ):  # fmt: skip
        row, k = HIDDEN * dtype.itemsize, case.rules.top_k
        numbers, gates = 4 * k, 8 * k
        there = rows_between(case, ranks)
        back = [list(column) for column in zip(*there, strict=True)]
        for rank, found in enumerate(world(ranks).run(sent, case, dtype)):
            counts = [8 * (to != rank) for to in range(ranks)]
            assert found["counts"] == counts
            assert found["forward"] == [
                c + n * (row + numbers + gates) + m * row
                for c, n, m in zip(counts, there[rank], back[rank], strict=True)
            ]
            assert found["backward"] == [
                n * row + m * (row + gates)
                for n, m in zip(there[rank], back[rank], strict=True)
            ]


def rows_of_uniform(tokens: int) -> tuple[int, int]:
    """Rows of a dispatch to all ranks, and copies: 8 of 64 experts, equally likely."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    scores_TE = torch.rand(tokens, 64, generator=generator, device="cpu")
    experts_Tk = scores_TE.topk(8).indices
    kept_Tk = torch.ones_like(experts_Tk, dtype=torch.bool)
    gates_Tk = torch.full(kept_Tk.shape, 1 / 8)
    plan = plan_once_a_rank(
        Routing(experts_Tk, gates_Tk, scores_TE, scores_TE, kept_Tk)
    )
    assert len(dispatch(scores_TE[:, :1], plan)) == sum(plan.received)
    return sum(plan.sent), experts_Tk.numel()


@pytest.mark.verifies(WAY[1], "xtrain.plan.experts:nodes_visited")
def test_of_64_experts_on_8_ranks_8_reach_5_ranks_and_a_half(world):
    tokens = 1000
    found = world(8).run(rows_of_uniform, tokens)
    mean = sum(rows for rows, _ in found) / (8 * tokens)
    assert mean == pytest.approx(nodes_visited(64, 8, 8), rel=0.01)
    assert nodes_visited(64, 8, 8) == pytest.approx(5.4, abs=0.05)
