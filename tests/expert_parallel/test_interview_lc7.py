"""Claims of the interview page of lc7, each run with and without its cause."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.devices import randn
from tests.expert_parallel import counted
from xtrain.expert_parallel import (
    DeepSeekMoE,
    GShardMoE,
    MoE,
    TopKRouter,
    expert_capacity,
    load_balancing_loss,
    within_capacity,
)
from xtrain_docs.lectures.lc7.balance import training

BALANCE = "xtrain.expert_parallel.balance"
DISPATCH = "xtrain.expert_parallel.dispatch"
CAPACITY = "xtrain.expert_parallel.routing"
GSHARD = "xtrain.expert_parallel.gshard:GShardMoE"
MOE = "xtrain.expert_parallel.moe:MoE"
ROUTER = "xtrain.expert_parallel.router:TopKRouter"


@pytest.fixture(autouse=True)
def on_gloo(xtrain_worlds):
    """Skip elsewhere: these are small runs of gloo on CPUs."""
    if xtrain_worlds.device != "cpu" or xtrain_worlds.backend not in (
        "gloo",
        "xtrain-virtual",
    ):
        pytest.skip("runs of gloo on CPUs")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return randn(*shape, generator=generator)


def a_router(experts: int = 8, top_k: int = 2, **options) -> TopKRouter:
    router = TopKRouter(6, experts, top_k, dtype=torch.float64, **options)
    with torch.no_grad():
        router.weight.copy_(drawn(0, experts, 6))
    return router


def a_moe(**options) -> MoE:
    torch.manual_seed(7)
    return MoE(6, 5, 8, 2, dtype=torch.float64, **options)


# ---------------------------------------------------------- q90: all-to-all, all-reduce


def test_an_all_to_all_has_uneven_messages_for_all_and_a_ring_even_ones_for_one(world):
    found = world(4).run(counted.messages_of_both)
    for rank, one in enumerate(found):
        peers = [peer for peer, _ in one["dispatch"]]
        assert sorted(peers) == [r for r in range(4) if r != rank]
        assert {peer for peer, _ in one["all-reduce"]} == {(rank + 1) % 4}
        sizes = [nbytes for _, nbytes in one["all-reduce"]]
        assert sizes == [16 * 6 * 8 // 4] * 6  # float64 in 4 chunks
    sizes = {nbytes for one in found for _, nbytes in one["dispatch"]}
    assert len(sizes) > 4


def test_the_busiest_rank_of_an_exchange_gets_more_than_the_mean(world):
    rows = world(4).run(counted.received_rows)
    assert sum(rows) == 4 * 16 * 2
    assert max(rows) > sum(rows) / 4


# ------------------------------------------------------------- q91: balance, collapse


@pytest.mark.verifies(MOE)
def test_an_expert_that_no_token_chooses_learns_nothing():
    moe, x = a_moe(), drawn(1, 32, 6)
    moe(x).square().sum().backward()
    counts = moe.router.stats.counts_E
    grads = moe.experts.down_proj.grad.flatten(1).norm(dim=1)
    assert (counts > 0).all()
    assert (grads > 0).all()
    x[:, 0] = 1
    with torch.no_grad():
        moe.router.weight[3:5, 0] = -100  # no token chooses these two
    moe.zero_grad()
    moe(x).square().sum().backward()
    unused = moe.router.stats.counts_E == 0
    assert unused.nonzero().flatten().tolist() == [3, 4]
    for weight in moe.experts.parameters():
        norms = weight.grad.flatten(1).norm(dim=1)
        assert not norms[unused].any()
        assert (norms[~unused] > 0).all()


def test_without_balancing_few_experts_get_the_tokens_and_with_it_all_do():
    """Of a layer that learns 16 maps: the busiest of 8 experts over the mean."""

    def busiest(way: str) -> float:
        loads = training(way, 1)["loads"][-10:]
        return sum(max(load) * 8 / sum(load) for load in loads) / 10

    assert busiest("none") > 2.5
    for way in ("loss", "bias"):
        assert busiest(way) < 2.0


# ----------------------------------------------------- q92: small and shared experts


@pytest.mark.verifies(MOE)
def test_four_times_as_many_experts_of_a_quarter_have_the_same_size_and_work():
    few, many = MoE(32, 64, 16, 2), MoE(32, 16, 64, 8)
    sizes = [sum(p.numel() for p in moe.experts.parameters()) for moe in (few, many)]
    assert sizes[0] == sizes[1]
    work = [moe.router.top_k * moe.experts.gate_proj[0].numel() for moe in (few, many)]
    assert work[0] == work[1]
    assert math.comb(64, 8) > 10**7 * math.comb(16, 2)


@pytest.mark.verifies("xtrain.expert_parallel.moe:DeepSeekMoE")
def test_a_shared_expert_sees_every_token_and_sends_nothing(world):
    torch.manual_seed(0)
    moe = DeepSeekMoE(6, 5, 8, 2, shared_experts=2, dtype=torch.float64)
    x = drawn(1, 12, 6)
    padding = torch.zeros(12, dtype=torch.bool)
    close(moe(x, padding), moe.shared(x))  # no routed expert
    with torch.no_grad():
        for weight in moe.experts.parameters():
            weight.zero_()
    close(moe(x), moe.shared(x))
    assert moe.shared.up_proj.out_features == 2 * 5
    plain, shared = (
        world(2).run(counted.exchanges, shared) for shared in (False, True)
    )
    assert plain == shared


# -------------------------------------------------------- q93: forward, and backward


@pytest.mark.verifies(GSHARD, f"{DISPATCH}:_Dispatch", f"{DISPATCH}:_Combine")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_four_exchanges_of_rows_and_one_of_counts(world, ranks):
    """Backward has the same splits: gradients to the experts, and back."""
    found = world(ranks).run(counted.exchanges)
    table = [one[1]["sent"] for one in found]
    for rank, (counts, *calls) in enumerate(found):
        assert counts["dtype"] == "torch.int64"
        assert all(call["dtype"] == "torch.float64" for call in calls)
        there, back, backward, last = ([c["sent"], c["received"]] for c in calls)
        assert there == [table[rank], [row[rank] for row in table]]
        assert back == last == there[::-1]
        assert backward == there
        assert sum(there[0]) == 16 * 2


def one_step(detach_gates: bool = False) -> list[Tensor]:
    """dx, the router's gradient, an expert's: of this rank, and of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    full, x = a_moe(), drawn(3, 16 * size, 6).requires_grad_()
    full(x).square().sum().backward()
    layer = GShardMoE.from_full(full)
    mine = x.detach().chunk(size)[rank].requires_grad_()
    if detach_gates:
        forward = layer.router.forward
        layer.router.forward = lambda *args: cut_off(forward(*args))
    layer(mine).square().sum().backward()
    router = layer.router.weight.grad
    router = torch.zeros_like(layer.router.weight) if router is None else router
    dist.all_reduce(router)
    return [
        mine.grad - x.grad.chunk(size)[rank],
        router - full.router.weight.grad,
        layer.experts.up_proj.grad - full.experts.up_proj.grad.chunk(size)[rank],
    ]


def cut_off(routing):
    """The routing without a gradient through its gates."""
    fields = {**routing.__dict__, "gates_Tk": routing.gates_Tk.detach()}
    return type(routing)(**fields)


@pytest.mark.verifies(GSHARD)
def test_backward_needs_the_branch_of_the_gates(world):
    for ranks in (1, 2, 4):
        for errors in world(ranks).run(one_step):
            assert all(error.abs().max() < 1e-10 for error in errors)
        for dx, router, expert in world(ranks).run(one_step, True):
            assert dx.norm() > 1e-3
            assert router.norm() > 1e-3
            assert expert.abs().max() < 1e-10  # which does not show it


# ---------------------------------------------------- q95, q96: top-k, kinds of gates


@pytest.mark.verifies(ROUTER)
def test_renormalised_softmax_is_the_softmax_of_the_chosen_logits():
    routing = a_router()(drawn(1, 5, 6))
    chosen = routing.logits_TE.gather(1, routing.experts_Tk)
    close(routing.gates_Tk, chosen.softmax(-1))


def test_raising_one_logit_lowers_other_softmax_scores_and_no_sigmoid():
    logits = drawn(2, 1, 8)
    higher = logits.clone()
    higher[0, 3] += 1
    others = [e for e in range(8) if e != 3]
    assert (higher.softmax(-1) < logits.softmax(-1))[0, others].all()
    assert torch.equal(higher.sigmoid()[0, others], logits.sigmoid()[0, others])


# ------------------------------------------------------------------------ q97: padding


@pytest.mark.verifies(ROUTER, f"{BALANCE}:load_balancing_loss")
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_padding_changes_no_loss_takes_no_place_and_is_not_sent(capacity_factor):
    x, router = drawn(1, 12, 6), a_router(capacity_factor=capacity_factor)
    router(x)
    alone = router.stats
    padded = torch.cat([torch.ones(20, 6).double(), x])
    router(padded, torch.arange(32) >= 20)
    masked = router.stats
    close(masked.load_balancing_loss, alone.load_balancing_loss)
    close(masked.z_loss, alone.z_loss)
    assert torch.equal(masked.counts_E, alone.counts_E)
    assert masked.dropped == alone.dropped
    assert not masked.routing.kept_Tk[:20].any()
    router(padded)
    assert abs(router.stats.load_balancing_loss - alone.load_balancing_loss) > 0.1
    assert not torch.equal(router.stats.counts_E, alone.counts_E)
    assert len(router.stats.routing.experts_Tk[:20].unique()) == 2  # all alike


# ---------------------------------------------------------------- q98: the Switch loss


@pytest.mark.verifies(f"{BALANCE}:load_balancing_loss")
def test_a_loss_below_1_is_possible_unless_tokens_are_sure():
    # Three tokens narrowly prefer expert 0, and one is sure of expert 1.
    p = torch.tensor([[0.51, 0.49]] * 3 + [[0.0, 1.0]], dtype=torch.float64)
    assert load_balancing_loss(p, p.argmax(1, keepdim=True)) < 0.9
    for seed in range(10):  # P equals f if each token is sure of its expert
        sure = torch.zeros(64, 8).double().scatter(1, drawn(seed, 64, 8).topk(1)[1], 1)
        assert load_balancing_loss(sure, sure.argmax(1, keepdim=True)) >= 1


# ------------------------------------------------------ q99: without an auxiliary loss


def biases_of_ranks(summed: bool) -> Tensor:
    router = a_router(balance_bias=True)
    for seed in range(3):
        router(drawn(10 * dist.get_rank() + seed, 32, 6))
        counts_E = router.stats.counts_E
        if summed:
            dist.all_reduce(counts_E)
        router.update_balance_bias(counts_E)
    return router.balance_bias


def test_biases_of_ranks_are_equal_if_counts_are_summed(world):
    first, second = world(2).run(biases_of_ranks, True)
    assert torch.equal(first, second)
    first, second = world(2).run(biases_of_ranks, False)
    assert not torch.equal(first, second)


# ---------------------------------------------------------------------- q100: capacity


@pytest.mark.verifies(
    "xtrain.plan.experts:expert_capacity", f"{CAPACITY}:within_capacity"
)
def test_capacity_is_the_mean_load_times_the_factor_rounded_up():
    assert expert_capacity(100, 8, 2, 1.0) == 25
    assert expert_capacity(100, 8, 2, 1.25) == 32
    experts_Tk = a_router()(drawn(1, 100, 6)).experts_Tk
    counts = torch.bincount(experts_Tk.flatten(), minlength=8)
    dropped = []
    for factor in (1.0, 1.25, 2.0, 8.0):
        capacity = expert_capacity(100, 8, 2, factor)
        kept = within_capacity(experts_Tk, 8, capacity)
        dropped.append(int((~kept).sum()))
        assert dropped[-1] == int((counts - capacity).clamp(min=0).sum())
    assert dropped[0] > dropped[1] > dropped[2] >= dropped[3] == 0


@pytest.mark.verifies(MOE)
def test_a_dropped_copy_adds_nothing_and_dropless_computes_all():
    x = drawn(1, 40, 6)
    dropless, limited = a_moe(), a_moe(capacity_factor=1.0)
    limited.load_state_dict(dropless.state_dict())
    whole, some = dropless(x), limited(x)
    kept = limited.router.stats.routing.kept_Tk
    assert dropless.router.stats.dropped == 0
    assert limited.router.stats.dropped > 0
    close(some[kept.all(1)], whole[kept.all(1)])
    assert not some[~kept.any(1)].any()
    assert (some != whole)[~kept.all(1)].any()


# ------------------------------------------------------------------------- q102: scale


def test_adam_hides_a_factor_and_the_norm_does_not():
    grad, steps, norms = drawn(1, 8), [], []
    for factor in (1.0, 4.0):
        weight = torch.zeros(8, dtype=torch.float64, requires_grad=True)
        weight.grad = factor * grad
        norms.append(torch.nn.utils.get_total_norm([weight.grad]))
        torch.optim.Adam([weight], lr=0.1).step()
        steps.append(weight.detach())
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-6, atol=0)
    close(norms[1], 4 * norms[0])


# ------------------------------------------------------------------------- q104: nodes


@pytest.mark.verifies(ROUTER)
def test_a_token_goes_to_no_more_nodes_than_the_limit():
    free, limited = (counted.nodes_of_tokens(64, 8, 8, limit, 512) for limit in (8, 4))
    assert max(map(int, free)) > 4  # these tokens do without an expert they like
    assert max(map(int, limited)) == 4
    assert sum(limited.values()) == 512
