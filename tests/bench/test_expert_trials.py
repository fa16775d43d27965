"""Experts as trials: every way leaves the same, and who computes else is not timed."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bench.contestants import wrong_beside
from tests.bench.test_runner import SHORT
from xtrain.bench import Case, RaceError
from xtrain.bench import expert_trials as trials
from xtrain.bench.expert_trials import (
    MOE_TOLERANCE,
    Sizes,
    gradients,
    layer_trial,
    masked_loop,
    moe_in_float64,
    ours,
    pair_trial,
    sharded_trial,
    transformers_block,
)
from xtrain.bench.races import lc7
from xtrain.bench.runner import run_measurement

SMALL = Sizes(8, 16)
SIZE = SMALL.bytes_of(48)
MODULE = "xtrain.bench.expert_trials"


def twice_the_gates(moe):
    """Each gate counts twice."""
    layer, weights, gather = ours(moe)
    moe.router.scale = 2.0
    return layer, weights, gather


def router_without_gradient(moe):
    """The output is right, the router learns nothing."""
    layer, weights, gather = ours(moe)
    return layer, weights, lambda found: gather([found[0] * 0, *found[1:]])


def gate_for_up(moe):
    """The gradients of two matrices are exchanged."""
    layer, weights, gather = ours(moe)
    return layer, weights, lambda f: gather([f[0], f[2], f[1], f[3]])


@pytest.mark.verifies(f"{MODULE}:layer_trial", f"{MODULE}:moe_in_float64")
@pytest.mark.parametrize(
    ("wrong", "output"),
    [(twice_the_gates, 0), (router_without_gradient, 2), (gate_for_up, 3)],
)
def test_a_layer_with_a_wrong_output_or_gradient_is_not_timed(world, wrong, output):
    race = wrong_beside(
        partial(layer_trial, ours, SMALL),
        partial(layer_trial, wrong, SMALL),
        SIZE,
        ranks=(1,),
        reference=partial(moe_in_float64, SMALL),
        tolerance=MOE_TOLERANCE,
    )
    with pytest.raises(RaceError) as caught:
        run_measurement(world(1), race, SIZE, SHORT)
    assert f"rank 0 output {output} differs" in str(caught.value.__cause__)


def errors(case: Case) -> dict[str, float]:
    """The worst difference of every way from float64, over all tensors."""
    right = moe_in_float64(SMALL, case)
    assert [list(t.shape) for t in right] == [
        [48, 8], [48, 8], [64, 8], [64, 16, 8], [64, 16, 8], [64, 8, 16]
    ]  # fmt: skip
    layers = {
        "ours": ours,
        "loop": masked_loop,
        "eager": partial(transformers_block, "eager"),
        "grouped": partial(transformers_block, "grouped_mm"),
    }
    ways = {
        **{name: partial(layer_trial, make, SMALL) for name, make in layers.items()},
        "ranks": partial(sharded_trial, SMALL),
    }
    found = {}
    for name, make in ways.items():
        outputs = make(case).outputs
        assert len(outputs) == len(right)
        pairs = zip(outputs, right, strict=True)
        found[name] = max((a.double() - b).abs().max().item() for a, b in pairs)
    return found


@pytest.mark.verifies(
    f"{MODULE}:masked_loop", f"{MODULE}:transformers_block", f"{MODULE}:sharded_trial"
)
def test_every_way_leaves_what_float64_leaves(world):
    for found in world(2).run(errors, Case(SIZE, 2), timeout=None):
        assert max(found.values()) < 1e-5, found
        assert min(found.values()) > 0, "all are fp32"


def who_computes(case: Case) -> bool:
    return layer_trial(ours, SMALL, case).call() is not None


def test_one_process_is_rank_0(world):
    assert world(2).run(who_computes, Case(SIZE, 2)) == [True, False]


def both_pairs(case: Case) -> tuple[list[float], bool, bool]:
    """Overlapped and one after the other: largest differences; a second pair's."""
    kept = []
    for together in (False, True):
        trial = pair_trial(together, 4, 0.0, SMALL, case)
        kept.append((trial, trial.call(), trial.call()))
    apart, together = (trial.outputs for trial, *_ in kept)
    pairs = zip(apart, together, strict=True)
    worst = [(a - b).abs().max().item() for a, b in pairs]
    (_, _, one), (_, _, other) = kept
    same = torch.allclose(one.dx, other.dx, atol=1e-6)
    moved = not torch.allclose(one.dx, apart[1], atol=1e-6)  # another micro-batch's
    return worst, same, moved


@pytest.mark.verifies(f"{MODULE}:pair_trial")
def test_both_pairs_leave_the_same_output_and_gradients(world):
    for worst, same, moved in world(2).run(both_pairs, Case(SIZE, 2)):
        assert len(worst) == 2 + 4 + 4, "y, dx, attention and norm, router and experts"
        assert max(worst) < 1e-5
        assert same and moved


def waits_of(together: bool, case: Case) -> int:
    """Messages of a pair that are waited for, on a network with a long delay."""
    slow, pauses = trials.slow_network, []
    trials.slow_network = lambda latency: slow(latency, sleep=pauses.append)
    try:
        trial = pair_trial(together, 4, 100.0, SMALL, case)
    finally:
        trials.slow_network = slow
    pauses.clear()
    trial.call()
    return len(pauses)


@pytest.mark.verifies(f"{MODULE}:pair_trial")
@pytest.mark.parametrize("together", [False, True])
def test_a_pair_sends_four_messages_and_its_counts(world, together):
    # dispatch and combine of both, and the counts of the forward
    assert world(2).run(waits_of, together, Case(SIZE, 2)) == [5, 5]


def test_the_sizes_of_the_goals():
    assert lc7.FEW // lc7.NARROW.bytes_of(1) == 256
    assert lc7.MANY // lc7.WIDE.bytes_of(1) == 2048
    assert lc7.PAIR // lc7.PAIR_SIZES.bytes_of(1) == 1024
    assert lc7.PAIR_SIZES == lc7.WIDE
    assert (lc7.NARROW.hidden, lc7.NARROW.inner) == (64, 128)
    assert (lc7.WIDE.hidden, lc7.WIDE.inner) == (256, 512)
    assert (trials.NUM_EXPERTS, lc7.PAIR_EXPERTS, trials.TOP_K) == (64, 8, 2)
    goals = {race.name: race.goals[0].ratio for race in lc7.RACES if race.goals}
    assert goals == {
        "loop_few": 2.2, "loop_many": 1.05, "transformers_few": 1.0,
        "transformers_many": 1.0, "overlap": 1.2,
    }  # fmt: skip


class GroupedProducts(TorchDispatchMode):
    """Counts torch's grouped products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() == "aten::_grouped_mm"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "products"), [(ours, 9), (partial(transformers_block, "grouped_mm"), 6)]
)
def test_transformers_has_six_grouped_products_where_ours_has_nine(make, products):
    """Its gate and up are one matrix: one product fewer in each of three places."""
    case = Case(lc7.FEW, 1)
    layer, weights, _ = make(lc7.NARROW.layer())
    x, dy = lc7.NARROW.tokens(case)
    with GroupedProducts() as counted:
        gradients(layer, weights, x.requires_grad_(), dy)
    assert counted.count == products
