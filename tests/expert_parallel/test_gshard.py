"""GShardMoE against the dense layer: any routing, any number of tokens on a rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.devices import same_numbers
from tests.expert_parallel import reference
from tests.expert_parallel.moe_cases import (
    EXPERTS,
    HIDDEN,
    MATRICES,
    SHARED,
    Case,
    case_of,
    check,
    close,
    fill,
    gradients,
    layer_of,
    losses_of,
    parameters,
    sharded,
    shared_of,
    trained,
    truth_of,
)
from tests.expert_parallel.reference import Rules
from tests.expert_parallel.test_router import CASES
from xtrain.expert_parallel import DeepSeekMoE, GShardMoE

LAYER = "xtrain.expert_parallel.gshard:GShardMoE"
WAY = [f"xtrain.expert_parallel.dispatch:{name}" for name in ("dispatch", "combine")]
RAGGED = [5, 0, 3, 7, 1, 4, 0, 2]
EVEN = [4] * 8


def experts_for(ranks: int) -> int:
    """8, or a number that 3 divides."""
    return EXPERTS if EXPERTS % ranks == 0 else 4 * ranks


def agreed(world, ranks: int, cases: list[Case]) -> None:
    """All cases in one run, each against its truth."""
    by_rank = world(ranks).run(trained, cases)
    for number, case in enumerate(cases):
        try:
            check(case, [found[number] for found in by_rank])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from error


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.verifies(LAYER, *WAY, "xtrain.expert_parallel.dispatch:DispatchPlan")
@pytest.mark.verifies("xtrain.expert_parallel.dispatch:plan_dispatch")
def test_any_number_of_choices_on_ragged_tokens(world, ranks):
    experts = experts_for(ranks)
    options = {"experts": experts}
    cases = [
        case_of(f"k = {k}", Rules(k), RAGGED[:ranks], **options) for k in range(1, 9)
    ]
    cases += [
        case_of("even", Rules(2), EVEN[:ranks], **options),
        case_of("one rank has all", Rules(3), [0] * (ranks - 1) + [9], **options),
        case_of("no tokens", Rules(2), [0] * ranks, shared=SHARED, **options),
        case_of("one token", Rules(1), [1] + [0] * (ranks - 1), **options),
    ]
    agreed(world, ranks, cases)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.verifies(LAYER, *WAY)
def test_every_option_of_the_layer(world, ranks):
    """Scores, groups, capacity; with padding, a shared expert, a bias; and without."""
    cases = []
    for name, rules in CASES.items():
        for extra in (False, True):
            options = {"experts": experts_for(ranks), "shared": SHARED * extra}
            case = case_of(
                f"{name}, extra = {extra}", rules, RAGGED[:ranks], masked=extra,
                biased=extra, **options,
            )  # fmt: skip
            if case.rules.top_k <= options["experts"]:
                cases.append(case)
    agreed(world, ranks, cases)


def one_wins(ranks: int, expert: int, **rules) -> Case:
    """All tokens want this expert, and only it."""
    case = case_of(
        f"all to {expert}", Rules(1, renormalize=False, **rules), EVEN[:ranks]
    )
    case.x = [x.abs() for x in case.x]
    case.made["router"][expert] = 9.0
    return case


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.verifies(LAYER, *WAY)
def test_all_tokens_to_one_expert_and_experts_without_any(world, ranks):
    cases = [one_wins(ranks, expert) for expert in (0, 5, EXPERTS - 1)]
    cases += [one_wins(ranks, 5, capacity_factor=factor) for factor in (1.0, 3.0)]
    for case in cases[:3]:
        counts = [sum(of) for of in zip(*truth_of(case).counts, strict=True)]
        assert sorted(counts) == [0] * (EXPERTS - 1) + [4 * ranks]
    agreed(world, ranks, cases)


@pytest.mark.verifies(LAYER)
def test_a_rank_of_padding_alone(world):
    case = case_of("padding", Rules(2), [4, 5], masked=True, shared=SHARED)
    case.mask[1][:] = False
    tight = case_of("tight", Rules(2, capacity_factor=0.5), [4, 5], masked=True)
    tight.mask[0][:] = False
    agreed(world, 2, [case, tight])


@pytest.mark.verifies(LAYER)
def test_a_capacity_is_that_of_the_tokens_of_one_rank(world):
    """What a rank drops depends on its own routing: ties and order of ranks aside."""
    rules = Rules(2, capacity_factor=0.5)
    counts = [6, 9, 0, 4]
    case = case_of("capacity", rules, counts)
    case.x = [x[:1].repeat(len(x), 1) for x in case.x]  # all tokens of a rank tie
    turned = case_of("turned", rules, counts)
    turned.x, turned.grad = case.x[::-1], case.grad[::-1]
    by_rank = world(4).run(trained, [case, turned])
    check(case, [found[0] for found in by_rank])
    check(turned, [found[1] for found in by_rank])
    for rank, tokens in enumerate(counts):
        mine, other = by_rank[rank][0], by_rank[3 - rank][1]
        close(mine.y, other.y)
        assert (mine.counts, mine.dropped) == (other.counts, other.dropped)
        room = -(-tokens * 2 // 16)  # of each of the two experts that all want
        assert sorted(mine.counts)[-2:] == [room, room]
        assert mine.y[:room].any(1).all() and not mine.y[room:].any()


@pytest.mark.verifies(LAYER)
def test_other_collectives_and_other_ways_to_compute(world):
    options = [
        {"collectives": "direct"}, {"collectives": "ring"}, {"backward": "autograd"},
        {"path": "padded"}, {"path": "loop"},
    ]  # fmt: skip
    cases = [
        case_of(str(one), Rules(3), RAGGED[:4], shared=SHARED, masked=True, **one)
        for one in options
    ]
    cases += [
        case_of(f"{one}, empty", Rules(1), [0, 2, 0, 0], **one) for one in options
    ]
    agreed(world, 4, cases)


def steps_of(case: Case, steps: int) -> dict[str, torch.Tensor]:
    """AdamW on this rank's tokens, another batch each step; the weights after it."""
    rank, layer = dist.get_rank(), sharded(case)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        x = case.x[rank].roll(step, 1)
        loss = layer(x).square().sum() / sum(map(len, case.x))
        for alpha, term in zip((0.3, 0.1), losses_of(layer), strict=True):
            loss = loss + alpha * term
        loss.backward()
        for name, parameter in parameters(layer).items():
            if name not in MATRICES:
                dist.all_reduce(parameter.grad)
        optimizer.step()
    return {name: p.detach() for name, p in parameters(layer).items()}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.verifies(LAYER, *WAY)
def test_several_adamw_steps_follow_the_dense_layer(world, ranks):
    """The experts' gradients are of the scale of all others: none is divided."""
    case = case_of("steps", Rules(2), RAGGED[:ranks], shared=SHARED)
    dense = {name: w.clone().requires_grad_() for name, w in case.made.items()}
    optimizer = torch.optim.AdamW(dense.values(), lr=0.02)
    x = torch.cat(case.x)
    for step in range(4):
        optimizer.zero_grad()
        answer = reference.dense_moe(
            x.roll(step, 1), *(dense[n] for n in ("router", *MATRICES)), case.rules,
            shared=shared_of(dense),
        )  # fmt: skip
        loss = answer.output_TH.square().sum() / len(x)
        (loss + 0.3 * answer.load_balancing_loss + 0.1 * answer.z_loss).backward()
        optimizer.step()
    local = EXPERTS // ranks
    for rank, found in enumerate(world(ranks).run(steps_of, case, 4)):
        for name, weight in found.items():
            whole = dense[name].detach()
            if name in MATRICES:
                whole = whole[rank * local : (rank + 1) * local]
            close(weight, whole, 1e-9)


def on_a_mesh(case: Case) -> tuple:
    """Two groups of experts, each rank with tokens of its own; summed over the mesh."""
    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("expert_data", "expert"))
    rank, group = dist.get_rank(), mesh["expert"].get_group()
    layer = sharded(case, group)
    x = case.x[rank].clone().requires_grad_()
    y = layer(x)
    loss = (y * case.grad[rank]).sum()
    for alpha, term in zip((0.3, 0.1), losses_of(layer), strict=True):
        loss = loss + alpha * term  # of the tokens of all four ranks
    loss.backward()
    alone = layer.experts.gate_proj.grad.clone()
    for name, grad in gradients(layer).items():
        over = mesh["expert_data"].get_group() if name in MATRICES else None
        dist.all_reduce(grad, group=over)
    groups = [mesh[axis].get_group() for axis in ("expert", "expert_data")]
    members = [dist.get_process_group_ranks(group) for group in groups]
    return y.detach(), x.grad, gradients(layer), alone, members


@pytest.mark.verifies(LAYER, *WAY)
def test_expert_data_times_expert(world):
    """Dense gradients are summed over both axes, the experts' over expert_data."""
    case = case_of("mesh", Rules(3), [5, 0, 3, 7], shared=SHARED)
    expected = truth_of(case)
    for rank, (y, dx, grads, alone, members) in enumerate(
        world(4).run(on_a_mesh, case)
    ):
        row, index = divmod(rank, 2)
        assert members == [[2 * row, 2 * row + 1], [index, index + 2]]
        assert (alone - grads["gate"]).abs().max() > 1e-3, "a sum is needed"
        close(y, expected.y[rank])
        close(dx, expected.dx[rank])
        for name, grad in grads.items():
            whole = expected.grads[name]
            if name in MATRICES:
                whole = whole[index * 4 : index * 4 + 4]
            close(grad, whole, 1e-11)


def in_any_shape(case: Case) -> list[float]:
    """Errors of a batch of sequences, of frozen inputs, without gradients."""
    rank, layer = dist.get_rank(), sharded(case)
    x, mask = case.x[rank], case.mask[rank]
    flat = layer(x, mask)
    batch = layer(x.view(2, 2, HIDDEN), mask.view(2, 2))
    with torch.no_grad():
        silent = layer(x, mask)
    layer.eval()
    assert not silent.requires_grad
    layer.zero_grad()
    (flat * case.grad[rank]).sum().backward()  # x is frozen: the experts still learn
    return [
        (batch.flatten(0, 1) - flat).abs().max().item(),
        (silent - flat).abs().max().item(),
    ], gradients(layer)


@pytest.mark.verifies(LAYER)
def test_any_shape_of_batch_and_inputs_without_gradients(world):
    case = case_of("shapes", Rules(2), [4, 4], masked=True)
    expected = truth_of(case).grads
    for rank, (errors, grads) in enumerate(world(2).run(in_any_shape, case)):
        assert max(errors) == 0
        for name in MATRICES:
            close(grads[name], expected[name][rank * 4 : rank * 4 + 4])


def in_16_bits(case: Case, kind: str) -> tuple:
    rank, full = dist.get_rank(), layer_of(case.rules, case.made)
    full = full.bfloat16() if kind == "bfloat16" else full.float()
    layer = GShardMoE.from_full(full)
    x = case.x[rank].to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    x = x.requires_grad_()
    device = torch.get_default_device().type
    with torch.autocast(device, torch.bfloat16, enabled=kind == "autocast"):
        y = layer(x)
        alone = full(x.detach())
    y.sum().backward()
    gates = layer.router.stats.routing.gates_Tk
    same = same_numbers(y.detach(), alone.detach(), torch.bfloat16)
    return y.dtype, x.grad.dtype, gates.dtype, same, gradients(layer)["up"].dtype


@pytest.mark.verifies(LAYER, "xtrain.expert_parallel.dispatch:copies_of")
def test_bf16_and_autocast_are_those_of_the_layer_on_one_device(world):
    case = case_of("bf16", Rules(2), [5, 3])
    half, whole = torch.bfloat16, torch.float32
    for found in world(2).run(in_16_bits, case, "bfloat16"):
        assert found == (half, half, whole, True, half)
    for found in world(2).run(in_16_bits, case, "autocast"):
        assert found == (half, whole, whole, True, whole)


def deepseek(case: Case) -> tuple:
    """A layer with a bias: three steps of it, counted over all ranks."""
    full = DeepSeekMoE(
        HIDDEN, 5, EXPERTS, 2, groups=4, top_groups=2, scale=2.5
    ).double()
    fill(full, case.made)
    layer = GShardMoE.from_full(full)
    rank, whole = dist.get_rank(), torch.cat(case.x)
    first = sum(map(len, case.x[:rank]))
    for _ in range(3):
        y, expected = layer(case.x[rank]), full(whole)
        close(y, expected[first : first + len(y)])
        counts = layer.router.stats.counts_E.clone()
        dist.all_reduce(counts)
        assert torch.equal(counts, full.router.stats.counts_E)
        layer.router.update_balance_bias(counts, rate=0.3)
        full.router.update_balance_bias(counts, rate=0.3)
        assert torch.equal(layer.router.balance_bias, full.router.balance_bias)
    assert layer.router.options() == full.router.options()
    return layer.router.balance_bias, layer.shared.gate_proj.weight.shape


@pytest.mark.verifies(LAYER, "xtrain.expert_parallel.moe:DeepSeekMoE")
def test_deepseeks_layer_and_its_bias_over_ranks(world):
    case = case_of("deepseek", Rules(2), RAGGED[:4], shared=5)
    first, *others = world(4).run(deepseek, case)
    assert first[0].dtype == torch.float64 and first[0].any()
    assert all(torch.equal(first[0], other[0]) for other in others)
    assert first[1] == (5, HIDDEN)


def copied_from_full() -> tuple:
    full = layer_of(Rules(2, "sigmoid", scale=1.5), case_of("", Rules(2), []).made)
    layer = GShardMoE.from_full(full)
    rank, local = dist.get_rank(), EXPERTS // dist.get_world_size()
    before = {name: p.detach().clone() for name, p in parameters(full).items()}
    with torch.no_grad():
        for name, parameter in parameters(layer).items():
            mine = before[name]
            if name in MATRICES:
                mine = mine[rank * local : (rank + 1) * local]
            assert torch.equal(parameter, mine), name
            parameter.add_(1)
    for name, parameter in parameters(full).items():
        assert torch.equal(parameter, before[name]), "a copy, not a view"
    return layer.experts.num_experts, layer.router.num_experts, layer.router.score


@pytest.mark.verifies(LAYER)
def test_from_full_copies_this_ranks_experts(world):
    assert world(4).run(copied_from_full) == [(2, EXPERTS, "sigmoid")] * 4
