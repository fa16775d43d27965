"""A layer that dispatches by a placement, against one process."""

import pytest
import torch
import torch.distributed as dist

from tests.expert_parallel.moe_cases import (
    HIDDEN,
    INNER,
    SHARED,
    case_of,
    layer_of,
    parameters,
)
from tests.expert_parallel.reference import Rules, tokens, weights
from tests.expert_parallel.test_gshard import EVEN, RAGGED, agreed, experts_for
from xtrain.expert_parallel import ExpertPlacement, GShardMoE, MoE, plan_placement

LAYER = "xtrain.expert_parallel.gshard:GShardMoE"
MODULE = "xtrain.expert_parallel.replicas"
WAY = [f"{MODULE}:slots_of", f"{MODULE}:slot_table", f"{MODULE}:sum_replicas"]


def planned(experts: int, ranks: int, more: int = 1) -> ExpertPlacement:
    """With so many slots a rank above the least, and an expert that most want."""
    loads = [40.0 if expert == 2 else 1.0 + expert for expert in range(experts)]
    return plan_placement(loads, ranks, min(experts, experts // ranks + more))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.verifies(LAYER, *WAY)
def test_experts_by_a_placement_train_as_one_process(world, ranks):
    """Outputs, losses, loads, and every gradient, that of replicas summed."""
    experts = experts_for(ranks)
    plan = planned(experts, ranks)
    assert ranks == 1 or len(plan.ranks_of(2)) > 1
    loose = ExpertPlacement(plan.loads, plan.experts, plan.slots_per_rank + 2)
    options = {"experts": experts, "placement": plan}
    tight = Rules(2, capacity_factor=0.5)
    masked = {"masked": True, "biased": True, "shared": SHARED}
    cases = [
        case_of("ragged", Rules(3), RAGGED[:ranks], **options),
        case_of("tight", tight, EVEN[:ranks], **masked, **options),
        case_of("no tokens", Rules(2), [0] * ranks, **options),
        case_of("empty slots", Rules(2), RAGGED[:ranks],
                **options | {"placement": loose}),
    ]  # fmt: skip
    agreed(world, ranks, cases)


def steps_of(placement: ExpertPlacement, count: int) -> tuple[float, list[int]]:
    """Largest error of any held weight after these steps, and rows of each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = weights(len(placement.loads), HIDDEN, INNER)
    whole = layer_of(Rules(2), made)
    layer = GShardMoE.from_full(whole, placement=placement)
    both = whole, layer
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in both]
    for step in range(count):
        every = [tokens(6, HIDDEN, seed=10 * step + r) for r in range(size)]
        for model, x in zip(both, (torch.cat(every), every[rank]), strict=True):
            model.zero_grad()
            model(x).square().sum().backward()
        layer.sum_replicas()
        dist.all_reduce(layer.router.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
    held = list(placement.experts[rank])
    right = {n: w if n == "router" else w[held] for n, w in parameters(whole).items()}
    error = max((w - right[n]).abs().max().item() for n, w in parameters(layer).items())
    same = [layer.experts.gate_proj.detach()[held.index(2)]] if 2 in held else []
    found: list = [None] * size
    dist.all_gather_object(found, same)
    copies = [one for part in found for one in part]
    assert len(copies) == len(placement.ranks_of(2))
    assert all(torch.equal(one, copies[0]) for one in copies), "to the bit"
    return error


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.verifies(LAYER, *WAY)
def test_replicas_stay_equal_to_the_bit_over_several_steps(world, ranks):
    errors = world(ranks).run(steps_of, planned(experts_for(ranks), ranks), 3)
    assert max(errors) < 1e-10


def rows_here(placement: ExpertPlacement) -> int:
    """How many rows this rank's experts get of tokens that all go to expert 2."""
    made = weights(len(placement.loads), HIDDEN, INNER)
    layer = GShardMoE.from_full(layer_of(Rules(1), made), placement=placement)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
        seen: list[int] = []
        layer.experts.register_forward_hook(lambda *args: seen.append(len(args[2])))
        layer(tokens(12, HIDDEN, seed=dist.get_rank()).abs())
    return seen[0]


@pytest.mark.verifies(WAY[0])
def test_the_replicas_of_an_expert_share_its_tokens(world):
    table = ((2, 0), (2, 1), (2, 3), (4, 5))
    placement = ExpertPlacement((1.0,) * 6, table, 2)
    assert world(4).run(rows_here, placement) == [16, 16, 16, 0]


def refused() -> None:
    full = MoE(HIDDEN, INNER, 4, 2)
    for table, text in (
        (((0, 1), (2, 3), (0, 1)), "4 experts on 3 ranks, for a layer of 4 experts"),
        (((0, 1, 2, 3), ()), r"ranks \[1\] have no expert"),
    ):
        with pytest.raises(ValueError, match=text):
            GShardMoE.from_full(full, placement=ExpertPlacement((1.0,) * 4, table, 4))
    with pytest.raises(ValueError, match="placement is a list"):
        GShardMoE.from_full(full, placement=[[0, 1], [2, 3]])
    tables = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    plan = ExpertPlacement((1.0,) * 4, tables[dist.get_rank()], 2)
    layer = GShardMoE.from_full(full, placement=plan)
    with pytest.raises(ValueError, match="placement"):
        layer(torch.zeros(3, HIDDEN))
    once = GShardMoE.from_full(full, once_a_rank=dist.get_rank() == 0)
    with pytest.raises(ValueError, match="once a rank"):
        once(torch.zeros(3, HIDDEN))


@pytest.mark.verifies(f"{MODULE}:check_placement")
@pytest.mark.verifies("xtrain.expert_parallel.checks:check_experts_call")
def test_a_placement_of_another_layer_or_of_this_rank_alone_is_refused(world):
    world(2).run(refused)
