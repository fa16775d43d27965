"""The whiteboard forms of lc7 equal one process that asks every expert for every token.

On groups of 1 to 4 ranks and on parts of the ranks, for top-1 to top-4, ranks without
tokens, experts without copies and one expert with all of them, in float64, fp32 and 16
bits; and they equal the library's where it has the same.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.expert_parallel.test_placement import best_possible, largest
from tests.tensor_parallel.dense import random_of, sub_group
from xtrain import expert_parallel as library
from xtrain.cluster.per_rank import replaced
from xtrain.expert_parallel.packing import replica_counts
from xtrain.expert_parallel.routing import within_capacity
from xtrain.whiteboard.expert_parallel import (
    overlapped_all_to_all as overlapped_file,
)
from xtrain.whiteboard.expert_parallel.combine import combine
from xtrain.whiteboard.expert_parallel.dispatch import dispatch
from xtrain.whiteboard.expert_parallel.expert_capacity import expert_capacity
from xtrain.whiteboard.expert_parallel.gshard_moe import GShardMoE
from xtrain.whiteboard.expert_parallel.load_balancing_loss import (
    load_balancing_loss,
)
from xtrain.whiteboard.expert_parallel.moe_backward import moe_backward
from xtrain.whiteboard.expert_parallel.moe_forward import moe_forward
from xtrain.whiteboard.expert_parallel.overlapped_all_to_all import (
    overlapped_all_to_all,
)
from xtrain.whiteboard.expert_parallel.plan_placement import plan_placement
from xtrain.whiteboard.expert_parallel.top_k_gradient import top_k_gradient
from xtrain.whiteboard.expert_parallel.top_k_router import TopKRouter
from xtrain.whiteboard.expert_parallel.update_balance_bias import (
    update_balance_bias,
)

FOLDER = "xtrain.whiteboard.expert_parallel"
ROUTER = f"{FOLDER}.top_k_router:TopKRouter"
GRADIENT = f"{FOLDER}.top_k_gradient:top_k_gradient"
LOSS = f"{FOLDER}.load_balancing_loss:load_balancing_loss"
CAPACITY = f"{FOLDER}.expert_capacity:expert_capacity"
BIAS = f"{FOLDER}.update_balance_bias:update_balance_bias"
FORWARD = f"{FOLDER}.moe_forward:moe_forward"
BACKWARD = f"{FOLDER}.moe_backward:moe_backward"
DISPATCH = f"{FOLDER}.dispatch:dispatch"
COMBINE = f"{FOLDER}.combine:combine"
GSHARD = f"{FOLDER}.gshard_moe:GShardMoE"
PLACEMENT = f"{FOLDER}.plan_placement:plan_placement"
OVERLAPPED = f"{FOLDER}.overlapped_all_to_all:overlapped_all_to_all"

GROUPS = [None, [0], [0, 1], [0, 1, 2], [1, 3]]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 0.02,
    torch.bfloat16: 0.08,
}
"""Of the largest value, if above 1; one process has the same inputs in float64."""
H, F_ = 6, 5
E = 12
"""Twelve experts lie evenly on 1, 2, 3 and 4 ranks."""
NAMES = ("gate_proj", "up_proj", "down_proj")


def near(actual: Tensor, expected: Tensor, what: str, dtype=torch.float64) -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype in (dtype, torch.float64, torch.float32), what
    if actual.numel() == 0:
        return
    allowed = TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    error = (actual.detach().double() - expected.double()).abs().max().item()
    assert error <= allowed, f"{what}: {error} > {allowed}"


def weights(dtype=torch.float64, experts: int = E) -> list[Tensor]:
    """The router's weight, and gate, up and down of all experts."""
    shapes = (experts, H), (experts, F_, H), (experts, F_, H), (experts, H, F_)
    return [
        random_of(20 + i, *shape).div(2).to(dtype) for i, shape in enumerate(shapes)
    ]


def scored(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Experts [T, k] and renormalised gates of a softmax: [T, E], most of them zero."""
    scores = (x @ router.T).softmax(-1)
    experts = scores.topk(top_k)[1]
    kept = scores * torch.zeros_like(scores).scatter(1, experts, 1)
    return experts, kept / kept.sum(-1, keepdim=True)


def every_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What each expert returns for each token: [T, E, H]."""
    inner = F.silu(torch.einsum("th,efh->tef", x, gate))
    inner = inner * torch.einsum("th,efh->tef", x, up)
    return torch.einsum("tef,ehf->teh", inner, down)


def dense(x: Tensor, of_layer: list[Tensor], top_k: int, grad: Tensor) -> list[Tensor]:
    """y, dx and the gradients of the four weights, in float64, by autograd."""
    leaves = [t.detach().double().clone().requires_grad_() for t in (x, *of_layer)]
    _, gates = scored(leaves[0], leaves[1], top_k)
    y = torch.einsum("te,teh->th", gates, every_expert(leaves[0], *leaves[2:]))
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]


# --- on one device --------------------------------------------------------------------


def chosen_by_sorting(row: list[float], top_k: int, groups: int, top: int) -> list[int]:
    """The k best experts of the best groups, of which the best k / top count."""
    step = len(row) // groups
    parts = [list(range(i, i + step)) for i in range(0, len(row), step)]
    judged = max(1, top_k // top)
    parts.sort(key=lambda p: -sum(sorted((row[i] for i in p), reverse=True)[:judged]))
    allowed = [i for part in parts[:top] for i in part]
    return sorted(allowed, key=lambda i: -row[i])[:top_k]


ROUTERS = list(
    itertools.product(
        ("softmax", "sigmoid"), (True, False), ((1, 1), (4, 2), (3, 1)), (1, 2, 4)
    )
)


@pytest.mark.verifies(ROUTER)
def test_a_router_chooses_the_best_and_gates_are_their_scores():
    for score, renormalize, (groups, top_groups), top_k in ROUTERS:
        router = TopKRouter(
            H, E, top_k, score, renormalize, 2.5, groups, top_groups
        ).double()
        twin = library.TopKRouter(
            H, E, top_k, score=score, renormalize=renormalize, scale=2.5,
            groups=groups, top_groups=top_groups, balance_bias=True,
        ).double()  # fmt: skip
        with torch.no_grad():
            for layer in (router, twin):
                layer.weight.copy_(weights()[0])
                layer.balance_bias.copy_(random_of(3, E) / 5)
        for tokens, dtype in ((0, torch.float64), (33, torch.float64),
                              (33, torch.bfloat16)):  # fmt: skip
            x = random_of(tokens, tokens, H, dtype=dtype)
            what = f"{score}, {renormalize}, {groups}, {top_k}, {tokens}, {dtype}"
            experts, gates, probabilities = router(x)
            logits = x.to(gates.dtype) @ router.weight.to(gates.dtype).T
            scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
            biased = (scores + router.balance_bias.to(scores.dtype)).tolist()
            best = [chosen_by_sorting(r, top_k, groups, top_groups) for r in biased]
            assert experts.tolist() == best, what
            kept = scores.gather(1, experts)
            kept = kept / kept.sum(-1, keepdim=True) if renormalize else kept
            near(gates, 2.5 * kept, what, gates.dtype)
            share = scores / scores.sum(-1, keepdim=True)
            near(probabilities, share, what, gates.dtype)
            routing = twin(x)
            assert torch.equal(experts, routing.experts_Tk), what
            near(gates, routing.gates_Tk, what, gates.dtype)
            near(probabilities, routing.probabilities_TE, what, gates.dtype)


@pytest.mark.verifies(ROUTER, GRADIENT)
def test_the_gradient_of_top_k_is_autograds():
    """By itself, behind a sigmoid, and behind a softmax that reaches all logits."""
    for tokens, top_k in ((0, 1), (1, 1), (17, 3), (17, E)):
        values_at, grad = random_of(1, tokens, E), random_of(2, tokens, top_k)
        leaf = values_at.clone().requires_grad_()
        values, experts = leaf.topk(top_k)
        (expected,) = torch.autograd.grad(values, leaf, grad)
        found = top_k_gradient(grad, experts, E)
        assert torch.equal(found, expected)
        assert torch.equal(found, library.top_k_gradient(grad, experts, E))
        assert grad.equal(random_of(2, tokens, top_k)), "the gradient was written"
    for score in ("softmax", "sigmoid"):
        router = TopKRouter(H, E, 3, score, renormalize=False).double()
        x, grad = random_of(4, 9, H), random_of(5, 9, 3)
        experts, gates, scores = router(x)
        (found,) = torch.autograd.grad(gates, router.weight, grad)
        dscores = top_k_gradient(grad, experts, E)
        s = (x @ router.weight.detach().T).sigmoid()
        of_softmax = scores * (dscores - (dscores * scores).sum(-1, keepdim=True))
        dlogits = of_softmax if score == "softmax" else dscores * s * (1 - s)
        near(found, dlogits.T @ x, score)


@pytest.mark.verifies(LOSS)
def test_the_loss_is_1_with_equal_loads_and_e_at_collapse():
    for dtype in TOLERANCE:
        for tokens, top_k in ((E, 1), (E, 2), (5 * E, 4)):
            copies = torch.arange(tokens * top_k).remainder(E).view(tokens, top_k)
            flat = torch.full((tokens, E), 1 / E, dtype=dtype)
            loss = load_balancing_loss(flat, copies)
            near(loss, torch.tensor(1.0), f"{tokens}, {top_k}", dtype)
            alone = torch.zeros(tokens, E, dtype=dtype).index_fill_(
                1, torch.tensor(3), 1
            )
            loss = load_balancing_loss(alone, torch.full((tokens, 1), 3))
            near(loss, torch.tensor(float(E)), "collapse", dtype)


@pytest.mark.verifies(LOSS)
def test_the_loss_of_a_part_is_the_librarys_with_its_gradient():
    for tokens, real in ((0, 0), (7, 0), (7, 7), (11, 4)):
        probabilities = random_of(1, tokens, E).softmax(-1).requires_grad_()
        experts = probabilities.topk(3)[1]
        mask = torch.arange(tokens) < real
        for of in (None, mask):
            loss = load_balancing_loss(probabilities, experts, of)
            right = library.load_balancing_loss(probabilities, experts, mask_T=of)
            grads = [torch.autograd.grad(x, probabilities)[0] for x in (loss, right)]
            near(loss, right, f"{tokens}, {real}")
            near(grads[0], grads[1], "gradient")
        counted = experts[:real].flatten().tolist()
        by_hand = sum(
            counted.count(e) / max(1, len(counted)) * probabilities[:real, e].mean()
            for e in range(E)
        ) if real else torch.tensor(0.0)  # fmt: skip
        near(loss, E * by_hand, "by hand")


@pytest.mark.verifies(CAPACITY)
def test_places_are_given_out_choice_by_choice_and_token_by_token():
    cases = itertools.product((0, 1, 20), (1, 2, 4), (0.25, 1.0, 1.25, 12.0))
    for tokens, top_k, factor in cases:
        for experts in (
            random_of(tokens, tokens, E).topk(top_k)[1],
            torch.arange(top_k).expand(tokens, top_k),  # all tokens choose the same
        ):
            capacity, kept = expert_capacity(experts, E, factor)
            assert capacity == library.expert_capacity(tokens, E, top_k, factor)
            free, expected = [capacity] * E, torch.zeros(tokens, top_k).bool()
            for choice, token in itertools.product(range(top_k), range(tokens)):
                expert = int(experts[token, choice])
                expected[token, choice] = free[expert] > 0
                free[expert] -= 1
            assert torch.equal(kept, expected)
            assert torch.equal(kept, within_capacity(experts, E, capacity))
    many = torch.zeros(30 * E, 1, dtype=torch.long)
    assert 1.1 * (30 * E) / E > 33  # 1.1 is meant as it is written
    assert expert_capacity(many, E, 1.1)[0] == 33


@pytest.mark.verifies(BIAS)
def test_the_bias_moves_against_the_load():
    for dtype in TOLERANCE:
        bias = torch.tensor([0.5, 0.0, -0.5, 0.25], dtype=dtype)
        twin = bias.clone()
        counts = torch.tensor([9, 1, 5, 5])
        for rate in (0.25, 0.125):
            update_balance_bias(bias, counts, rate)
            library.update_balance_bias(twin, counts, rate)
        assert bias.tolist() == [0.125, 0.375, -0.5, 0.25] and torch.equal(bias, twin)


@pytest.mark.verifies(FORWARD, BACKWARD)
def test_a_layer_by_hand_is_every_expert_for_every_token():
    for tokens, top_k in itertools.product((0, 1, 23), (1, 2, E)):
        for dtype in TOLERANCE if (tokens, top_k) == (23, 2) else (torch.float64,):
            given = [random_of(1, tokens, H, dtype=dtype), *weights(dtype)]
            grad = random_of(2, tokens, H, dtype=dtype)
            kept = [t.clone() for t in (*given, grad)]
            y, saved = moe_forward(*given, top_k)
            found = [y, *moe_backward(grad, saved)]
            expected = dense(given[0], given[1:], top_k, grad)
            for what, x, right in zip("yxrgud", found, expected, strict=True):
                near(x, right, f"{what}, {tokens}, {top_k}, {dtype}", dtype)
                assert x.dtype == dtype
            assert all(map(torch.equal, (*given, grad), kept)), "inputs written"
            if dtype == torch.float64:
                y, of_library = library.moe_forward(*given, top_k)
                near(found[0], y, "the library's y")
                twins = library.moe_backward(grad, of_library)
                for x, right in zip(found[1:], twins, strict=True):
                    near(x, right, "the library's gradients")


@pytest.mark.verifies(FORWARD, BACKWARD)
def test_a_layer_whose_tokens_all_choose_one_expert():
    """The other eleven get no rows, and gradients of zero."""
    given = [random_of(1, 9, H).abs(), *weights()]
    given[1][4] = 50
    grad = random_of(2, 9, H)
    y, saved = moe_forward(*given, 1)
    found = [y, *moe_backward(grad, saved)]
    for x, right in zip(found, dense(given[0], given[1:], 1, grad), strict=True):
        near(x, right, "one expert has all tokens")
    for x in found[3:]:
        assert [i for i in range(E) if x[i].any()] == [4]


def placed(loads, ranks: int, slots: int) -> list[list[int]]:
    """A form's plan, in which every expert has a place and none two on one rank."""
    table = plan_placement(loads, ranks, slots)
    assert len(table) == ranks and max(map(len, table)) <= slots
    assert all(sorted(set(held)) == held for held in table)
    assert {e for held in table for e in held} == set(range(len(loads)))
    return table


@pytest.mark.verifies(PLACEMENT)
def test_small_plans_are_the_best_ones_or_near():
    """All tables are tried, also those that leave slots free."""
    ratios = []
    for ranks, experts in itertools.product((1, 2, 3), (1, 2, 3, 4)):
        for slots in range(-(-experts // ranks), experts + 1):
            if (ranks, experts) == (3, 4) and slots > 2:
                continue  # thousands of tables
            for loads in itertools.product((0, 1, 3, 8), repeat=experts):
                table = placed(loads, ranks, slots)
                assert sum(map(len, table)) == ranks * slots
                best = best_possible(loads, ranks, slots)
                ratios.append(largest(loads, table) / best if best else 1.0)
    assert max(ratios) <= 1.5
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) > 0.85 * len(ratios)
    # Two equal experts on two ranks: a copy of one of them is worse than a free slot.
    assert largest((8, 8, 0), plan_placement((8, 8, 0), 2, 2)) == 12


@pytest.mark.verifies(PLACEMENT)
def test_the_longest_goes_to_the_emptiest_rank_and_the_hottest_gets_the_copies():
    assert plan_placement([8, 2, 2, 1], 2, 3) == [[0, 1, 2], [0, 1, 3]]
    assert plan_placement([1] * 6, 3, 2) == [[0, 3], [1, 4], [2, 5]]
    assert plan_placement([1, 1, 1, 9, 3], 3, 2) == [[1, 3], [2, 3], [0, 4]]
    for ranks, slots, E in ((4, 16, 64), (8, 9, 64), (8, 3, 20)):
        for seed in range(5):
            loads = random_of(seed, E).square().mul(100).tolist()
            table = placed(loads, ranks, slots)
            counts = [sum(e in held for held in table) for e in range(E)]
            assert counts == replica_counts(loads, ranks * slots, ranks)
            replica = max(x / n for x, n in zip(loads, counts, strict=True))
            assert largest(loads, table) <= sum(loads) / ranks + replica
            swapped = library.plan_placement(loads, ranks, slots)
            assert largest(loads, table) < 1.05 * max(swapped.load_of_rank)


@pytest.mark.verifies(PLACEMENT)
def test_a_copy_for_which_no_other_rank_is_free_is_left_out():
    loads = [9, 2, 2, 1, 1, 1, 1, 1]
    assert replica_counts(loads, 18, 3) == [3, 3, 3, 2, 2, 2, 2, 1]
    table = placed(loads, 3, 6)
    assert sorted(map(len, table)) == [5, 6, 6]


# --- over ranks -----------------------------------------------------------------------


def on_every_group(case, *args) -> None:
    for members in GROUPS:
        group = sub_group(members) if members else None
        if members is None or group is not None:
            case(group, dist.get_world_size(group), *args)


def sizes_of(kind: str, size: int) -> list[int]:
    """How many tokens each rank has."""
    if kind == "none":
        return [0] * size
    return [9] * size if kind == "even" else [5, 0, 8, 3][:size]


KINDS = ("even", "ragged", "none", "one expert")


def layer_inputs(kind: str, size: int, dtype) -> tuple[Tensor, list[Tensor], Tensor]:
    """Tokens of all ranks, the layer's weights, the gradient of the output."""
    total = sum(sizes_of(kind, size))
    x, of_layer = random_of(1, total, H, dtype=dtype), weights(dtype)
    if kind == "one expert":
        x = x.abs()
        of_layer[0][E - 1] = 4  # on the last rank; far from all others
    return x, of_layer, random_of(2, total, H, dtype=dtype)


def table_case(group, size) -> None:
    """Rows and counts of dispatch, then the sum of combine, from the whole table."""
    rank, local = dist.get_rank(group), E // size
    for kind, top_k in itertools.product(KINDS, (1, 2, 4)):
        tokens = sizes_of(kind, size)
        for dtype in TOLERANCE if kind == "ragged" else (torch.float64,):
            x, of_layer, _ = layer_inputs(kind, size, dtype)
            experts, gates = scored(x.double(), of_layer[0].double(), top_k)
            gates = gates.gather(1, experts)
            xs, tables = x.split(tokens), experts.split(tokens)
            kept = xs[rank].clone()
            rows, counts, plan = dispatch(xs[rank], tables[rank], E, group)
            expected = [
                torch.cat([xs[r][tables[r].eq(e).any(-1)] for r in range(size)])
                for e in range(rank * local, (rank + 1) * local)
            ]
            assert torch.equal(rows, torch.cat(expected)), kind
            assert counts.tolist() == [len(part) for part in expected]
            routing = library_routing(tables[rank], gates.split(tokens)[rank])
            right = library.plan_dispatch(routing, group)
            assert torch.equal(rows, library.dispatch(xs[rank], right))
            assert torch.equal(counts, right.counts_L)

            number = torch.arange(rank * local, (rank + 1) * local).add(1)
            done = rows * number.repeat_interleave(counts).unsqueeze(1).to(dtype)
            done_before = done.clone()
            y = combine(done, gates.split(tokens)[rank], plan)
            whole = x.double() * (gates * (experts + 1)).sum(1, keepdim=True)
            what = f"combine, {kind}, {top_k}, {dtype}"
            near(y, whole.split(tokens)[rank], what, dtype)
            twin = library.combine(done, gates.split(tokens)[rank], right)
            near(y, twin, "the library's combine", dtype)
            turned = done.t().contiguous().t()  # in another order of memory
            assert torch.equal(y, combine(turned, gates.split(tokens)[rank], plan))
            assert torch.equal(kept, xs[rank]) and torch.equal(done, done_before)


def library_routing(experts: Tensor, gates: Tensor) -> Any:
    scores = torch.zeros(len(experts), E)
    kept = torch.ones_like(experts, dtype=torch.bool)
    return library.Routing(experts, gates, scores, scores, kept)


@pytest.mark.verifies(DISPATCH, COMBINE)
def test_rows_go_to_their_experts_and_back(world):
    world(4).run(on_every_group, table_case)


def whole_layer(of_layer: list[Tensor], top_k: int) -> library.MoE:
    moe = library.MoE(H, F_, E, top_k, dtype=of_layer[0].dtype)
    with torch.no_grad():
        for parameter, value in zip(moe.parameters(), of_layer, strict=True):
            parameter.copy_(value)
    return moe


def gshard_case(group, size) -> None:
    rank = dist.get_rank(group)
    for kind, top_k in itertools.product(KINDS, (1, 2, 4)):
        tokens = sizes_of(kind, size)
        many = kind == "ragged" and top_k == 2
        for dtype in TOLERANCE if many else (torch.float64,):
            x, of_layer, grad = layer_inputs(kind, size, dtype)
            y, dx, drouter, *dweights = dense(x, of_layer, top_k, grad)
            moe = whole_layer(of_layer, top_k)
            layer = GShardMoE(moe, group)
            mine = x.split(tokens)[rank].clone().unsqueeze(0).requires_grad_()
            kept = mine.detach().clone()
            out = layer(mine)
            out.backward(grad.split(tokens)[rank].unsqueeze(0))
            what = f"{kind}, {top_k}, {dtype}"
            near(out[0], y.split(tokens)[rank], f"y, {what}", dtype)
            of_library = library.GShardMoE.from_full(moe, group)(mine)
            near(out, of_library, f"the library's y, {what}", dtype)
            near(mine.grad[0], dx.split(tokens)[rank], f"dx, {what}", dtype)
            for name, full in zip(NAMES, dweights, strict=True):
                part = full.chunk(size)[rank]
                near(getattr(layer, name).grad, part, f"{name}, {what}", dtype)
            total = layer.router.grad.double()
            dist.all_reduce(total, group=group)
            near(total, drouter, f"router, {what}", dtype)
            assert torch.equal(mine, kept), "inputs written"


@pytest.mark.verifies(GSHARD)
def test_experts_on_ranks_equal_one_process(world):
    world(4).run(on_every_group, gshard_case)


# --- two micro-batches ----------------------------------------------------------------


def chunk_of(scale: Tensor) -> Any:
    """Work that differs for the two micro-batches."""
    return lambda i, rows: (rows @ scale).tanh() + i


def overlapped_case(group, size) -> None:
    rank, scales = dist.get_rank(group), random_of(7, 6, H, H)
    for length, dtype in itertools.product((1, 3), TOLERANCE):
        given = [random_of(2 * rank + i, length * size, H, dtype=dtype) for i in (0, 1)]
        kept = [x.clone() for x in given]

        for layers in (0, 1, 3):
            chunks = [chunk_of(scales[n].to(dtype)) for n in range(2 * layers)]
            found = overlapped_all_to_all(given, chunks, group)
            for i in (0, 1):
                rows = given[i]
                for chunk in chunks:
                    came = torch.empty_like(rows)
                    dist.all_to_all_single(came, chunk(i, rows), group=group)
                    rows = came
                assert torch.equal(found[i], rows), f"{layers} layers, {dtype}"
        assert all(map(torch.equal, given, kept)), "inputs written"


@pytest.mark.verifies(OVERLAPPED)
def test_two_micro_batches_in_turn_are_one_after_another(world):
    world(4).run(on_every_group, overlapped_case)


class Noted:
    """torch.distributed, of which is noted when messages begin and are waited for."""

    def __init__(self, events: list[str]):
        self.events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("issue")
        work = dist.all_to_all_single(*args, **kwargs)
        return SimpleNamespace(wait=lambda: (work.wait(), self.events.append("wait")))


def events_of_two_chunks() -> list[str]:
    events: list[str] = []

    def chunk(i: int, rows: Tensor) -> Tensor:
        events.append(f"compute {i}")
        return rows

    with replaced(overlapped_file, "dist", Noted(events)):
        overlapped_all_to_all([torch.ones(4, 2), torch.ones(4, 2)], [chunk, chunk])
    return events


@pytest.mark.verifies(OVERLAPPED)
def test_one_computes_while_the_rows_of_the_other_travel(world):
    step = ["compute 1", "wait", "issue", "compute 0", "wait", "issue"]
    expected = ["compute 0", "issue", *step, "compute 1", "wait", "issue", "wait"]
    for events in world(4).run(events_of_two_chunks):
        assert events == expected
