"""The classic bugs of lc7: broken twins fail the checks that the right code passes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from snippets.wrong.lc7 import (
    accumulator,
    aux_scale,
    balance_loss,
    clip_norm,
    concatenated,
    detached,
    discarded_loss,
    empty_expert,
    expert_scale,
    gate_twice,
    gathered_input,
    random_drop,
    router_partial,
    size_check,
    slots,
)
from torch import Tensor

from tests.snippets.gallery import all_fail, drawn, ranks, same
from xtrain import expert_parallel as library
from xtrain.comm import init_mesh
from xtrain.expert_parallel.moe_by_hand import moe_backward, moe_forward
from xtrain.testing import RankTimeout
from xtrain.whiteboard.expert_parallel import (
    expert_capacity as capacity_form,
)
from xtrain.whiteboard.expert_parallel import (
    gshard_moe,
    load_balancing_loss,
)
from xtrain.whiteboard.expert_parallel import moe_backward as backward_form
from xtrain.whiteboard.expert_parallel import moe_forward as forward_form

GSHARD = "xtrain.expert_parallel.gshard:GShardMoE"
MOE = "xtrain.expert_parallel.moe:MoE"
BY_HAND = "xtrain.expert_parallel.moe_by_hand:moe_backward"
BALANCE = "xtrain.expert_parallel.balance:load_balancing_loss"
CAPACITY = "xtrain.expert_parallel.routing:within_capacity"
FORMS = "xtrain.whiteboard.expert_parallel"
GSHARD_FORM = f"{FORMS}.gshard_moe:GShardMoE"
BACKWARD_FORM = f"{FORMS}.moe_backward:moe_backward"
BALANCE_FORM = f"{FORMS}.load_balancing_loss:load_balancing_loss"
CAPACITY_FORM = f"{FORMS}.expert_capacity:expert_capacity"
LAYERS = (library.GShardMoE.from_full, gshard_moe.GShardMoE)


def a_moe(experts: int = 4, top_k: int = 2, **options) -> library.MoE:
    """The same on every rank."""
    moe = library.MoE(4, 6, experts, top_k, dtype=torch.float64, **options)
    with torch.no_grad():
        for seed, weight in enumerate(moe.parameters()):
            weight.copy_(drawn(seed, *weight.shape))
    return moe


def dense_moe(moe: library.MoE, x: Tensor) -> Tensor:
    """Every token through every expert; then those count that it has chosen."""
    p = F.linear(x, moe.router.weight).softmax(-1)
    values, chosen = p.topk(moe.router.top_k)
    gates = torch.zeros_like(p).scatter(1, chosen, values / values.sum(-1, True))
    weights = moe.experts
    inner = F.silu(torch.einsum("th,efh->tef", x, weights.gate_proj))
    inner = inner * torch.einsum("th,efh->tef", x, weights.up_proj)
    return torch.einsum("tef,ehf,te->th", inner, weights.down_proj, gates)


def to_expert_0(moe: library.MoE, x: Tensor) -> None:
    """Turn the router so that all these tokens choose expert 0 alone."""
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[0, 0] = 5.0
        x[:, 0] = x[:, 0].abs() + 1


def wrong_beyond_one_rank(worlds, check, right, wrong, sizes=(1, 2, 4)) -> None:
    """`right` rules pass on any number of ranks; one rank hides that others are wrong.

    A rule is (rule,), or the arguments of the check that begin with it.
    """
    for size in sizes:
        for rule in right:
            worlds[size].run(check, *rule)
        for rule in wrong:
            if size == 1:
                worlds[size].run(check, *rule)
            else:
                all_fail(worlds[size], check, *rule)


# ------------------------------------------------------------------- gates and buffers


def gradients_are_autograds(backward, top_k, of=("dx", "dgates", "dweights")) -> None:
    """`backward(dy, x, gates, experts, weights)`; each expert is one matrix."""
    x, dy, weights = drawn(1, 6, 4), drawn(2, 6, 4), drawn(3, 3, 4, 4)
    scores, experts = drawn(4, 6, 3).topk(top_k)
    leaves = [t.requires_grad_() for t in (x, scores.softmax(-1), weights)]
    y = gate_twice.moe(leaves[0], leaves[1], experts, leaves[2])[0]
    expected = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        found = backward(dy, x, leaves[1], experts, weights)
    for name, one, right in zip(
        ("dx", "dgates", "dweights"), found, expected, strict=True
    ):
        if name in of:
            same(one, right, name)


def layer_is_dense(forward, backward) -> None:
    for top_k in (1, 2, 4):
        moe, x, dy = a_moe(top_k=top_k), drawn(9, 12, 4), drawn(10, 12, 4)
        x.requires_grad_()
        leaves = [x, *moe.parameters()]
        y = dense_moe(moe, x)
        expected = torch.autograd.grad(y, leaves, dy)
        with torch.no_grad():
            out, saved = forward(*leaves, top_k)
            found = backward(dy, saved)
        for one, right in zip((out, *found), (y, *expected), strict=True):
            same(one, right)


@pytest.mark.verifies(BY_HAND, BACKWARD_FORM)
def test_a_gate_goes_into_each_gradient_once():
    check, twin = gradients_are_autograds, gate_twice
    for top_k in (1, 2, 3):
        check(partial(twin.backward, rule=twin.once), top_k)
    twice, never = (
        partial(twin.backward, rule=rule) for rule in (twin.twice, twin.never)
    )
    for rule in (twice, never):
        check(rule, 1)  # what hides it: the gate of one expert is 1
    check(twice, 2, of=("dweights",))
    check(never, 2, of=("dgates",))
    for rule, names in ((twice, ("dx", "dgates")), (never, ("dx", "dweights"))):
        for name in names:
            with pytest.raises(AssertionError, match=name):
                check(rule, 2, of=(name,))
    layer_is_dense(moe_forward, moe_backward)
    layer_is_dense(forward_form.moe_forward, backward_form.moe_backward)


def twice_is_bitwise_once(gradient) -> None:
    """The same step two times, while torch fills uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gradient().clone() for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not first.isnan().any(), "NaN"
    assert torch.equal(first, second), "twice"


def dx_of_the_layer(options) -> Tensor:
    moe, x = a_moe(**options), drawn(9, 12, 4).requires_grad_()
    moe(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.verifies(MOE, BY_HAND, BACKWARD_FORM)
def test_the_sum_of_input_gradients_begins_at_zero():
    dy, weights = drawn(1, 6, 4), drawn(2, 2, 4, 4)
    tokens = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 5])  # token 3 was dropped
    check, twin = twice_is_bitwise_once, accumulator
    made = partial(twin.input_gradient, dy, tokens, weights)
    twin.kept.__defaults__[0].clear()
    assert torch.equal(made(twin.kept), made(twin.zeros))  # the first step hides it
    check(partial(made, twin.zeros))
    for start, what in ((twin.unset, "NaN"), (twin.kept, "twice")):
        with pytest.raises(AssertionError, match=what):
            check(partial(made, start))
    for options in ({}, {"capacity_factor": 0.5}, {"backward": "autograd"}):
        check(partial(dx_of_the_layer, options))
    with torch.no_grad():
        arguments = drawn(9, 12, 4), *a_moe().parameters(), 2
    for forward, backward in (
        (moe_forward, moe_backward),
        (forward_form.moe_forward, backward_form.moe_backward),
    ):
        _, saved = forward(*arguments)
        check(lambda back=backward, s=saved: back(drawn(10, 12, 4), s)[0])


def tokens_get_their_own_rows(received, tokens) -> None:
    tokens = [torch.tensor(chosen) for chosen in tokens]
    chunks = [(10.0 * e + t)[:, None].double() for e, t in enumerate(tokens)]
    gates = [torch.full((len(chosen),), e + 1.0) for e, chosen in enumerate(tokens)]
    expected = torch.zeros(4, 1)
    for e, chosen in enumerate(tokens):
        for t in chosen.tolist():
            expected[t] += (e + 1) * (10 * e + t)
    same(concatenated.combine(chunks, tokens, gates, 4, received), expected)


@pytest.mark.verifies(MOE)
def test_the_rows_of_an_expert_go_to_its_own_tokens():
    check, twin = tokens_get_their_own_rows, concatenated
    one_each, ragged = [[1], [0], [2]], [[0, 2, 3], [1], [0, 3]]
    for tokens in (one_each, ragged):
        check(twin.split_again, tokens)
    check(twin.concatenated, one_each)  # what hides it
    with pytest.raises(AssertionError):
        check(twin.concatenated, ragged)
    moe, x = a_moe(), drawn(9, 12, 4)
    same(moe(x), dense_moe(moe, x))
    assert moe.router.stats.counts_E.unique().numel() > 1  # ragged, too


# --------------------------------------------------------------- experts without tokens


def experts_have_the_sum_of_replicas(sum_gradient, experts) -> None:
    rank, size = ranks()
    weights = [drawn(e, 3, 3).requires_grad_() for e in range(2)]
    x, experts = drawn(5, 8, 3), torch.tensor(experts)
    whole = sum((x[experts == e] @ w).square().sum() for e, w in enumerate(weights))
    expected = torch.autograd.grad(whole, weights)
    mine = x.chunk(size)[rank], experts.chunk(size)[rank]
    empty_expert.train(*mine, weights, sum_gradient)
    dist.barrier()
    for weight, right in zip(weights, expected, strict=True):
        assert weight.grad is not None
        same(weight.grad, right)


def no_gradient_is_none(make_layer) -> None:
    """All tokens choose experts of rank 0."""
    rank, _ = ranks()
    moe, x = a_moe(top_k=1), drawn(rank, 3, 4)
    to_expert_0(moe, x)
    layer = make_layer(moe)
    (layer(x).square().sum() + x.sum()).backward()
    dist.barrier()
    for name, weight in layer.named_parameters():
        assert weight.grad is not None, name
        if rank and "router" not in name:
            assert not weight.grad.any(), name


@pytest.mark.verifies(GSHARD, GSHARD_FORM)
def test_an_expert_without_tokens_has_a_gradient_of_zeros(worlds):
    check, twin, world = experts_have_the_sum_of_replicas, empty_expert, worlds[2]
    mixed, one_each = [0, 1] * 4, [0] * 4 + [1] * 4
    for experts in (mixed, one_each):
        world.run(check, twin.sum_always, experts)
    world.run(check, twin.sum_if_there, mixed)  # what hides it
    all_fail(world, check, twin.sum_if_there, one_each)
    for make_layer in LAYERS:
        world.run(no_gradient_is_none, make_layer)


def backward_ends(expert) -> None:
    had = detached.program(expert)
    dist.barrier()
    assert had


@pytest.mark.verifies(GSHARD, GSHARD_FORM)
def test_a_rank_without_rows_takes_part_in_backward(worlds):
    for size in (1, 2, 3):
        worlds[size].run(backward_ends, detached.attached)
    worlds[1].run(backward_ends, detached.detached)  # what hides it
    with pytest.raises(RankTimeout) as caught:
        worlds[2].run(backward_ends, detached.detached, timeout=2)
    assert "waiting in all_to_all_single(" in caught.value.reports[0].summary
    for make_layer in LAYERS:  # with a timeout, and not for ever
        worlds[2].run(no_gradient_is_none, make_layer, timeout=30)


# ---------------------------------------------------------------------------- capacity


def tokens_have_all_of_their_output_or_none(choose) -> None:
    """Each rank has some columns of the expert's input, and all tokens."""
    rank, _ = ranks()
    torch.manual_seed(rank)
    x, weight = drawn(1, 6, 4), drawn(2, 2, 4)
    found = random_drop.expert(x, weight, choose(6, 3))
    dist.barrier()
    whole = x @ weight.T
    for y, right in zip(found, whole, strict=True):
        assert not y.any() or torch.allclose(y, right), (y, right)


def by_capacity(tokens, capacity):
    chosen = torch.zeros(tokens, 1, dtype=torch.long)
    kept_Tk = library.within_capacity(chosen, 1, capacity)
    return kept_Tk[:, 0].nonzero().flatten()


def by_the_form(tokens, capacity):
    chosen = torch.zeros(tokens, 1, dtype=torch.long)
    most, kept_Tk = capacity_form.expert_capacity(chosen, 1, capacity / tokens)
    assert most == capacity
    return kept_Tk[:, 0].nonzero().flatten()


@pytest.mark.verifies(CAPACITY, CAPACITY_FORM)
def test_all_ranks_drop_the_same_tokens(worlds):
    check, twin = tokens_have_all_of_their_output_or_none, random_drop
    right = [(twin.first_come,), (by_capacity,), (by_the_form,)]
    wrong_beyond_one_rank(worlds, check, right, [(twin.at_random,)])


def dropped_tokens_give_zero(moe, capacity) -> None:
    x, weights = drawn(1, 6, 2), drawn(2, 2, 2, 2)
    experts = torch.tensor([0, 0, 1, 0, 0, 1])
    found = moe(x, experts, weights, capacity)
    seen = [0, 0]
    for t, e in enumerate(experts.tolist()):
        right = x[t] @ weights[e] if seen[e] < capacity else torch.zeros_like(x[t])
        seen[e] += 1
        same(found[t], right, f"token {t}")


@pytest.mark.verifies(MOE, CAPACITY)
def test_a_dropped_token_takes_no_slot():
    check, twin = dropped_tokens_give_zero, slots
    for capacity in (1, 2, 3, 4):
        check(twin.dropped, capacity)
        if capacity == 4:  # what hides it
            check(twin.clamped, capacity)
        else:
            with pytest.raises(AssertionError, match="token 0|token 1|token 3"):
                check(twin.clamped, capacity)
    moe, x = a_moe(top_k=1, capacity_factor=2.0), drawn(3, 8, 4)
    to_expert_0(moe, x)  # a capacity of 4
    found = moe(x)
    same(found[:4], dense_moe(moe, x)[:4])
    assert not found[4:].any()


# -------------------------------------------------------------------- the balance loss


def uniform_is_one(rule) -> None:
    for tokens in (8, 64, 512):
        scores = balance_loss.balanced(tokens, 8, 2)
        loss = rule(scores.softmax(-1), 2)
        assert abs(loss.item() - 1) < 1e-3, tokens
        assert loss.requires_grad, "no gradient"


def by_choice(function):
    """A loss of probabilities and chosen experts, as one of probabilities and k."""
    return lambda p, k: function(p, p.topk(k).indices)


@pytest.mark.verifies(BALANCE, BALANCE_FORM)
def test_the_balance_loss_of_uniform_routing_is_1_and_has_a_gradient():
    for function in (
        library.load_balancing_loss,
        load_balancing_loss.load_balancing_loss,
    ):
        uniform_is_one(by_choice(function))
    uniform_is_one(balance_loss.switch_loss)
    with pytest.raises(AssertionError, match="8"):
        uniform_is_one(balance_loss.of_selected)
    with pytest.raises(AssertionError, match="no gradient"):
        uniform_is_one(balance_loss.of_counts)


def coefficient_reaches_the_router(attach) -> None:
    x, router = drawn(1, 64, 4), drawn(2, 4, 4).requires_grad_()
    without, _ = discarded_loss.step(x, router, attach, coefficient=0.0)
    found, _ = discarded_loss.step(x, router, attach, coefficient=0.5)
    p = (x @ router.T).softmax(-1)
    loss = 0.5 * library.load_balancing_loss(p, p.topk(1).indices)
    (right,) = torch.autograd.grad(loss, router)
    same(found - without, right)


@pytest.mark.verifies(MOE, BALANCE)
def test_the_coefficient_of_the_balance_loss_reaches_the_router():
    coefficient_reaches_the_router(discarded_loss.added)
    with pytest.raises(AssertionError):
        coefficient_reaches_the_router(discarded_loss.discarded)
    moe, x = a_moe(), drawn(9, 12, 4)
    moe(x)
    stats = moe.router.stats
    (found,) = torch.autograd.grad(stats.load_balancing_loss, moe.router.weight)
    p = F.linear(x, moe.router.weight).softmax(-1)
    loss = balance_loss.switch_loss(p, 2)
    same(found, torch.autograd.grad(loss, moe.router.weight)[0])


def two_kinds_of_text() -> tuple[Tensor, Tensor]:
    """The tokens of each half have their own expert, but for one."""
    x = torch.eye(2).double().repeat_interleave(4, 0)
    x[0] = x[7]
    return x, torch.eye(2).double().requires_grad_()


def balance_is_that_of_one_process(step) -> None:
    rank, size = ranks()
    x, router = two_kinds_of_text()
    p = (x @ router.T).softmax(-1)
    whole = 2 * (aux_scale.share(p) * p.mean(0)).sum()
    (right,) = torch.autograd.grad(whole, router)
    loss, grad = step(x.chunk(size)[rank], router)
    dist.barrier()
    same(loss, whole.detach(), "loss")
    same(grad, right, "gradient")


def step_of_the_library(x, router):
    p = (x @ router.T).softmax(-1)
    chosen = p.topk(1).indices
    loss = library.load_balancing_loss(p, chosen, groups=[None])
    (grad,) = torch.autograd.grad(loss, router)
    dist.all_reduce(grad)
    return loss.detach(), grad


@pytest.mark.verifies(BALANCE)
def test_the_balance_loss_is_that_of_all_ranks_tokens(worlds):
    check, twin = balance_is_that_of_one_process, aux_scale
    right = [(partial(twin.step, rule=twin.of_all_tokens),), (step_of_the_library,)]
    rules = twin.of_own_tokens, twin.not_divided
    wrong = [(partial(twin.step, rule=rule),) for rule in rules]
    wrong_beyond_one_rank(worlds, check, right, wrong)


# ----------------------------------------------------------- gradients over the ranks


def gradients_have_one_scale(rule, of=("router", "experts")) -> None:
    found = expert_scale.ratios(a_moe(), drawn(9, 16, 4), rule)
    dist.barrier()
    for name, ratio in zip(("router", "experts"), found, strict=True):
        if name in of:
            assert abs(ratio - 1) < 1e-9, (name, ratio)


@pytest.mark.verifies(GSHARD)
def test_experts_have_gradients_of_the_same_scale_as_the_router(worlds):
    check, twin = gradients_have_one_scale, expert_scale
    rules = twin.mean_of_own, twin.averaged_again
    right = [(twin.divided_once,), *((rule, ("router",)) for rule in rules)]
    wrong = [(rule, ("experts",)) for rule in rules]  # which the router hides
    wrong_beyond_one_rank(worlds, check, right, wrong)


def routers_stay_equal(sum_gradients) -> None:
    rank, size = ranks()
    full, x = a_moe(), drawn(9, 16, 4)
    layer = router_partial.train(full, x.chunk(size)[rank], sum_gradients, 2)
    first = layer.router.weight.detach().clone()
    dist.broadcast(first, 0)
    for _ in range(2):
        full.zero_grad()
        ((dense_moe(full, x) - x).square().sum() / len(x)).backward()
        with torch.no_grad():
            for weight in full.parameters():
                weight -= 0.5 * weight.grad
    dist.barrier()
    same(layer.router.weight.detach(), first, "other ranks")
    same(first, full.router.weight.detach(), "one process")


@pytest.mark.verifies(GSHARD)
def test_the_routers_gradient_is_summed_over_expert_ranks(worlds):
    check, twin = routers_stay_equal, router_partial
    wrong_beyond_one_rank(worlds, check, [(twin.like_dense,)], [(twin.like_an_expert,)])


def input_has_the_gradient_of_all_experts(moe) -> None:
    rank, size = ranks()
    x, weights = drawn(1, 12, 3), drawn(2, 4, 3, 3)[:size]
    experts = torch.arange(12) * 7 % 5 % size
    x.requires_grad_()
    y = torch.einsum("th,tho->to", x, weights[experts])
    (right,) = torch.autograd.grad(y.square().sum(), x)
    mine = x.detach().chunk(size)[rank].requires_grad_()
    out = moe(mine, experts.chunk(size)[rank], weights[rank])
    (dx,) = torch.autograd.grad(out.square().sum(), mine)
    dist.barrier()
    same(out, y.chunk(size)[rank], "out")
    same(dx, right.chunk(size)[rank], "dx")


def layer_has_the_gradient_of_all_experts(make_layer) -> None:
    rank, size = ranks()
    moe, x = a_moe(), drawn(9, 12, 4).requires_grad_()
    (right,) = torch.autograd.grad(dense_moe(moe, x).square().sum(), x)
    mine = x.detach().chunk(size)[rank].requires_grad_()
    out = make_layer(moe)(mine)
    (dx,) = torch.autograd.grad(out.square().sum(), mine)
    dist.barrier()
    same(dx, right.chunk(size)[rank], "dx")


@pytest.mark.verifies(GSHARD, GSHARD_FORM)
def test_the_gradient_of_gathered_tokens_comes_from_all_ranks(worlds):
    check, twin = input_has_the_gradient_of_all_experts, gathered_input
    right, wrong = (partial(twin.moe, back=back) for back in (twin.summed, twin.own))
    wrong_beyond_one_rank(worlds, check, [(right,)], [(wrong,)])
    for size in (1, 2, 4):
        for make_layer in LAYERS:
            worlds[size].run(layer_has_the_gradient_of_all_experts, make_layer)


def norm_is_that_of_one_process(norm) -> None:
    rank, size = ranks()
    dense, experts = drawn(1, 5), drawn(2, size, 3)
    right = torch.cat([dense, experts.flatten()]).norm()
    found = norm(dense, experts[rank])
    dist.barrier()
    same(found, right)


def test_the_norm_counts_each_parameter_once(worlds):
    check, twin = norm_is_that_of_one_process, clip_norm
    wrong = [(twin.of_this_rank,), (twin.of_all_ranks,)]
    wrong_beyond_one_rank(worlds, check, [(twin.of_each_once,)], wrong, (1, 2, 3))


# ------------------------------------------------------------------------------- sizes


def every_group_has_every_expert(rule) -> None:
    """Whatever passes the check has all experts in each group of expert ranks."""
    for data in range(1, 9):
        for expert in range(1, data + 1):
            for experts in (8, 12):
                try:
                    rule(data, 1, data, 1, expert, experts)
                except ValueError:
                    continue
                lacking = size_check.lacking(data, expert, experts)
                assert not any(lacking), (data, expert, experts, lacking)


def refused_by_the_library() -> tuple[str, str]:
    """8 experts on 3 ranks; and a mesh of 2 x 2 on 3 ranks."""
    said = []
    for build in (
        lambda: library.GShardMoE.from_full(a_moe(experts=8)),
        lambda: init_mesh((2, 2), ("expert_data", "expert")),
    ):
        try:
            build()
            said.append("")
        except ValueError as problem:
            said.append(str(problem))
    return said[0], said[1]


@pytest.mark.verifies(GSHARD)
def test_sizes_are_checked_with_the_expert_ranks(worlds):
    every_group_has_every_expert(size_check.check_right)
    with pytest.raises(AssertionError):
        every_group_has_every_expert(size_check.check)
    for experts, mesh in worlds[3].run(refused_by_the_library):
        assert "8" in experts
        assert "3" in experts
        assert mesh
