"""What a layer over ranks refuses: on every rank, before any message; none hangs."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.devices import skip_unless_mistakes_are_told
from tests.expert_parallel import reference
from tests.expert_parallel.moe_cases import EXPERTS, HIDDEN, INNER, layer_of
from tests.expert_parallel.reference import Rules
from xtrain.comm import CommLedger
from xtrain.expert_parallel import GShardMoE, MoE, Routing, plan_dispatch

MODULE = "xtrain.expert_parallel.checks"
LAYER = "xtrain.expert_parallel.gshard:GShardMoE"

# What is called otherwise, and words that the error must have.
CALLS = {
    "one token": ({"x": torch.zeros(HIDDEN)}, r"needs \[\.\.\., hidden size\]"),
    "no tokens at all": ({"x": None}, "tokens: NoneType is not a tensor"),
    "a list for a mask": ({"mask": [True] * 3}, "mask: list is not a tensor"),
    "another hidden size": (
        {"x": torch.zeros(3, 5, dtype=torch.float64)},
        r"\[3, 5\]: needs \[T, 6\]",
    ),
    "integers": (
        {"x": torch.zeros(3, HIDDEN, dtype=torch.int64)},
        "not a floating-point",
    ),
    "a mask of numbers": ({"mask": torch.ones(3)}, "needs bool"),
    "a longer mask": (
        {"mask": torch.ones(4, dtype=torch.bool)},
        r"mask of shape \[4\]",
    ),
    "a mask of another shape": (
        {"x": torch.zeros(2, 2, HIDDEN), "mask": torch.ones(4, dtype=torch.bool)},
        r"mask of shape \[4\] for tokens of shape \[2, 2, 6\]",
    ),
    "another dtype than the experts": (
        {"x": torch.zeros(3, HIDDEN, dtype=torch.float32)},
        "float32 and the experts torch.float64",
    ),
    "another dtype, and no tokens": (
        {"x": torch.zeros(0, HIDDEN, dtype=torch.float32)},
        "float32 and the experts torch.float64",
    ),
}
# Right by itself, but not what the other ranks call.
DIFFERENT = {
    "no gradients": ({"no_grad": True}, "gradient"),
    "no gradients, tokens frozen": (
        {"no_grad": True, "everyone": {"frozen": "x"}},
        "gradient of experts",
    ),
    "no gradients, experts frozen": (
        {"no_grad": True, "everyone": {"frozen": "experts"}},
        "gradient of tokens",
    ),
    "frozen tokens": ({"frozen": "x"}, "gradient"),
    "frozen experts": ({"frozen": "experts"}, "gradient"),
    "another dtype": ({"dtype": torch.float32}, "dtype"),
    "autocast": ({"dtype": torch.float32, "autocast": True}, "dtype"),
    "another choice": ({"rules": Rules(3)}, "top_k"),
    "more experts": ({"experts": 2 * EXPERTS}, "experts"),
}


def call(changes: dict) -> torch.Tensor:
    """A layer and a call of it, with these changes."""
    made = reference.weights(changes.get("experts", EXPERTS), HIDDEN, INNER)
    layer = GShardMoE.from_full(layer_of(changes.get("rules", Rules(2)), made))
    dtype = changes.get("dtype", torch.float64)
    layer = layer.to(dtype)
    x = changes.get("x", torch.ones(3, HIDDEN, dtype=dtype))
    frozen = changes.get("frozen")
    if x is not None and x.is_floating_point():
        x = x.clone().requires_grad_(frozen != "x")
    layer.experts.requires_grad_(frozen != "experts")
    device = torch.get_default_device().type
    autocast = torch.autocast(device, torch.bfloat16, enabled="autocast" in changes)
    with autocast, torch.set_grad_enabled("no_grad" not in changes):
        return layer(x, changes.get("mask"))


def told(cases: dict, wrong_ranks: list[int]) -> list[tuple[str, str, int]]:
    """Case, error and messages, of each; then a call that is right."""
    found = []
    for case, (changes, _) in cases.items():
        mine = dict(changes.get("everyone", {}))
        mine |= changes if dist.get_rank() in wrong_ranks else {}
        error = ""
        with CommLedger() as ledger:
            try:
                call(mine)
            except ValueError as raised:
                error = str(raised)
        found.append((case, error, ledger.messages))
        assert call({}).isfinite().all()
    return found


@pytest.mark.parametrize("wrong_ranks", [[0, 1], [1]])
@pytest.mark.verifies(f"{MODULE}:check_experts_call", f"{MODULE}:check_batch", LAYER)
def test_a_wrong_call_is_refused_on_every_rank_before_any_message(
    world, xtrain_worlds, wrong_ranks
):
    if wrong_ranks == [1]:
        skip_unless_mistakes_are_told(xtrain_worlds)
    for found in world(2).run(told, CALLS, wrong_ranks):
        assert [case for case, _, _ in found] == list(CALLS)
        for case, error, messages in found:
            assert messages == 0, case
            assert "GShardMoE" in error, (case, error)
            wrong = re.search(CALLS[case][1], error)  # or, of one rank, what differs
            assert wrong or ("dtype" in case and "different dtype" in error), error


@pytest.mark.verifies(f"{MODULE}:check_experts_call", f"{MODULE}:computed_in", LAYER)
def test_ranks_that_call_differently_are_refused(world, xtrain_worlds):
    skip_unless_mistakes_are_told(xtrain_worlds)
    for found in world(4).run(told, DIFFERENT, [2]):
        for case, error, messages in found:
            assert messages == 0, case
            assert re.search(DIFFERENT[case][1], error), (case, error)


def uneven() -> list[tuple[str, int]]:
    """Experts that do not divide by the ranks: in each way to say so."""
    made = reference.weights(EXPERTS, HIDDEN, INNER)
    full = layer_of(Rules(2), made)
    routing: Routing = full.router(torch.ones(3, HIDDEN, dtype=torch.float64))
    found = []
    for call_ in (
        lambda: GShardMoE(HIDDEN, INNER, EXPERTS, 2),
        lambda: GShardMoE.from_full(full),
        lambda: plan_dispatch(routing),
    ):
        with CommLedger() as ledger:
            try:
                call_()
            except ValueError as error:
                found.append((str(error), len(ledger.events)))
    return found


@pytest.mark.verifies("xtrain.expert_parallel.dispatch:experts_per_rank", LAYER)
def test_experts_that_do_not_divide_are_refused_before_anything_is_sent(world):
    for found in world(3).run(uneven):
        assert len(found) == 3
        for error, events in found:
            assert "8 experts on 3 ranks" in error and events == 0


OPTIONS = {
    "too many choices": ({"top_k": 9}, "top_k=9"),
    "another score": ({"score": "relu"}, "'relu'"),
    "no capacity": ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
    "uneven groups": ({"groups": 3}, "groups=3"),
    "another backward": ({"backward": "none"}, "backward='none'"),
    "no hidden size": ({"hidden_size": 0}, "hidden_size=0"),
}


def optioned() -> list[str]:
    found = []
    for changes, _ in OPTIONS.values():
        sizes = {
            "hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS,
            "top_k": 2,
        }  # fmt: skip
        for kind in (MoE, GShardMoE):
            try:
                kind(**{**sizes, **changes})
            except ValueError as error:
                found.append(str(error))
    return found


@pytest.mark.verifies(LAYER, "xtrain.expert_parallel.moe:MoE")
def test_options_that_do_not_fit_are_refused_by_both_layers(world):
    words = [word for _, word in OPTIONS.values() for _ in range(2)]
    for found in world(2).run(optioned):
        assert len(found) == len(words)
        for error, word in zip(found, words, strict=True):
            assert word in error
