"""What the errata page of lc7 says: computed, run, and run with and without it."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import randn
from tests.expert_parallel import counted
from xtrain.expert_parallel import (
    GShardMoE,
    combine,
    dispatch,
    plan_dispatch,
)
from xtrain_docs.lectures.lc7.balance import training

DISPATCH = "xtrain.expert_parallel.dispatch"
GSHARD = "xtrain.expert_parallel.gshard:GShardMoE"
TOP_K = "xtrain.expert_parallel.routing:top_k_gradient"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_gloo(xtrain_worlds):
    """Skip elsewhere: these are small runs of gloo on CPUs."""
    if xtrain_worlds.device != "cpu" or xtrain_worlds.backend not in (
        "gloo",
        "xtrain-virtual",
    ):
        pytest.skip("runs of gloo on CPUs")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return randn(*shape, generator=generator)


# ------------------------------------------------------------------------ e84: top-k


def test_the_gradient_is_the_slope_wherever_the_choice_stays():
    """By finite differences, with exact halves; and a jump where the choice changes."""
    scores, step = drawn(1, 8), 2.0**-20
    values, experts = scores.topk(3)
    for expert in range(8):
        higher = scores.clone()
        higher[expert] += step
        slope = (higher.topk(3).values.sum() - values.sum()) / step
        assert abs(slope - float(expert in experts)) < 1e-8
    outputs = drawn(3, 8)  # of experts that know nothing of the scores
    third, fourth = scores.topk(4).indices[2:]
    equal = scores.clone()
    equal[fourth] = equal[third]
    sums = []
    for shift in (-1e-12, 1e-12):
        moved = equal.clone()
        moved[fourth] += shift
        gates, chosen = moved.topk(3)
        sums.append((gates.softmax(0) * outputs[chosen]).sum())
    assert abs(sums[1] - sums[0]) > 1e-3


# ----------------------------------------------------------------- e85, e86: the map


def gradient_of_gates(keep: bool) -> float:
    """The router's gradient, off by: with the outputs that came back, or with x."""
    full = counted.full_layer()
    router, k = full.router, full.router.top_k
    x = counted.own_tokens()
    routing = router(x)
    plan = plan_dispatch(routing)
    layer = GShardMoE.from_full(full)
    rows = layer.experts(dispatch(x, plan), plan.counts_L)
    y = combine(rows, routing.gates_Tk, plan)
    dy = 2 * y.detach()
    copies = torch.ones(len(x), k, k, dtype=torch.float64) * torch.eye(k)
    outputs = torch.stack(  # [k, T, H]: each copy's output alone, at home again
        [combine(rows.detach(), copies[:, j].contiguous(), plan) for j in range(k)]
    )
    found = torch.einsum("th,kth->tk", dy, outputs if keep else x.expand(k, -1, -1))
    (right,) = torch.autograd.grad(y, routing.gates_Tk, dy)
    return float((found - right).norm() / right.norm())


@pytest.mark.verifies(f"{DISPATCH}:combine")
def test_the_gradient_of_a_gate_is_the_product_of_dy_with_its_experts_output(world):
    for ranks in (1, 2, 4):
        assert max(world(ranks).run(gradient_of_gates, True)) < 1e-12
        assert min(world(ranks).run(gradient_of_gates, False)) > 0.1


# ----------------------------------------------------------------------- e87: balance


def busiest(way: str, seed: int, top_k: int = 1) -> float:
    """Copies of the busiest of 8 experts over the mean, in the last 10 steps."""
    loads = training(way, top_k, seed)["loads"][-10:]
    return sum(max(load) * 8 / sum(load) for load in loads) / 10


@pytest.mark.verifies("xtrain.expert_parallel.balance:update_balance_bias")
@pytest.mark.verifies("xtrain.expert_parallel.balance:load_balancing_loss")
def test_a_bias_balances_without_a_loss_and_collapse_is_a_tendency():
    alone = [busiest("none", seed) for seed in range(2)]
    assert min(alone) > 2
    assert min(alone) < 6 < 7.9 < max(alone)  # all tokens to one expert in one run only
    for way in ("loss", "bias"):
        assert busiest(way, 0) < 0.6 * min(alone)


# ----------------------------------------------------------------------- e88: numbers


def test_lectures_have_consecutive_numbers():
    pages = (ROOT / "mkdocs.yml").read_text()
    named = [int(n) for n in re.findall(r'^      - "(\d+) · ', pages, re.MULTILINE)]
    assert named == list(range(1, len(named) + 1))
    folders = {int(n) for n in re.findall(r" lc(\d+)-[a-z-]+/index\.md", pages)}
    assert folders == set(named)
    assert 6 in named
