"""Learning-rate schedules against torch's schedulers, over all steps of a run."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_rates

from xtrain.comm.agreement import problem_of
from xtrain.train.rates import Rate, rate_at

RATE_AT = "xtrain.train.rates:rate_at"
Later = Callable[[torch.optim.Optimizer], torch_rates.LRScheduler]


def torch_factors(
    warmup: int, parts: list[tuple[int, Later]], steps: int
) -> list[float]:
    """Of SequentialLR: linear warm-up, then each part from its first step on."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if warmup:
        rise = torch_rates.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)
        schedulers: list[torch_rates.LRScheduler] = [rise]
        starts = [first for first, _ in parts]
    else:
        schedulers, starts = [], [first for first, _ in parts[1:]]
    schedulers += [make(optimizer) for _, make in parts]
    scheduler = torch_rates.SequentialLR(optimizer, schedulers, milestones=starts)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def stable(optimizer: torch.optim.Optimizer) -> torch_rates.LRScheduler:
    return torch_rates.LambdaLR(optimizer, lambda step: 1.0)


lengths = st.integers(1, 12)


@pytest.mark.verifies(RATE_AT)
@given(st.integers(0, 12), lengths)
@example(0, 1)
def test_constant(warmup: int, after: int) -> None:
    spec, total = Rate(kind="constant", warmup=warmup), warmup + after
    wanted = torch_factors(warmup, [(warmup, stable)], total)
    assert [rate_at(s, spec, total) for s in range(total)] == pytest.approx(wanted)


@pytest.mark.verifies(RATE_AT)
@given(st.integers(0, 12), lengths, st.sampled_from([0.0, 0.1, 1.0]))
@example(0, 1, 0.1)
def test_cosine(warmup: int, after: int, least: float) -> None:
    spec, total = Rate(warmup=warmup, min_ratio=least), warmup + after

    def cosine(optimizer: torch.optim.Optimizer) -> torch_rates.LRScheduler:
        return torch_rates.CosineAnnealingLR(optimizer, after, eta_min=least)

    wanted = torch_factors(warmup, [(warmup, cosine)], total)
    assert [rate_at(s, spec, total) for s in range(total)] == pytest.approx(wanted)
    assert rate_at(total, spec, total) == pytest.approx(least)
    assert rate_at(total + 5, spec, total) == pytest.approx(least)


@pytest.mark.verifies(RATE_AT)
@given(
    st.integers(0, 8),
    st.integers(1, 8),
    lengths,
    st.sampled_from([0.0, 0.1]),
    st.sampled_from(["linear", "1-sqrt"]),
)
def test_warm_up_stable_decay(
    warmup: int, between: int, decay: int, least: float, shape: str
) -> None:
    spec = Rate(kind="wsd", warmup=warmup, decay=decay, min_ratio=least, shape=shape)
    total = warmup + between + decay

    def falling(optimizer: torch.optim.Optimizer) -> torch_rates.LRScheduler:
        if shape == "linear":
            return torch_rates.LinearLR(optimizer, 1.0, least, decay)
        return torch_rates.LambdaLR(
            optimizer, lambda s: least + (1 - least) * (1 - math.sqrt(s / decay))
        )

    parts = [(warmup, stable), (total - decay, falling)]
    wanted = torch_factors(warmup, parts, total)
    assert [rate_at(s, spec, total) for s in range(total)] == pytest.approx(wanted)
    assert rate_at(total, spec, total) == pytest.approx(least)


@pytest.mark.verifies(RATE_AT)
def test_decay_unless_given() -> None:
    """All steps after warm-up for cosine, a fifth of all for wsd."""
    for kind, decay in (("cosine", 90), ("wsd", 20)):
        given_, own = (
            Rate(kind=kind, warmup=10, decay=decay),
            Rate(kind=kind, warmup=10),
        )
        for step in range(120):
            assert rate_at(step, own, 100) == rate_at(step, given_, 100)


@pytest.mark.verifies(RATE_AT)
def test_a_cosine_that_ends_early_stays_at_its_end() -> None:
    spec = Rate(warmup=2, decay=4, min_ratio=0.25)
    assert [rate_at(s, spec, 10) for s in (6, 7, 9)] == [0.25] * 3
    assert rate_at(5, spec, 10) > 0.25


@pytest.mark.verifies(RATE_AT)
def test_warm_up_meets_decay() -> None:
    """The lower one counts: 1/4, 2/4, then decay from 4 steps before the end."""
    spec = Rate(kind="wsd", warmup=3, decay=4, min_ratio=0.0, shape="linear")
    found = [rate_at(step, spec, 5) for step in range(6)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 0.5, 0.25, 0.0])


@pytest.mark.verifies(RATE_AT)
def test_a_longer_run_has_the_same_steps_before_decay() -> None:
    for spec in (Rate(kind="constant", warmup=3), Rate(kind="wsd", warmup=3, decay=10)):
        for step in range(90):
            assert rate_at(step, spec, 100) == rate_at(step, spec, 1000)


@pytest.mark.verifies(RATE_AT)
@given(st.integers(0, 60), st.integers(1, 50), st.integers(0, 60), st.booleans())
def test_a_run_shorter_than_its_warm_up(
    step: int, total: int, warmup: int, cosine: bool
) -> None:
    spec = Rate(kind="cosine" if cosine else "wsd", warmup=warmup)
    assert 0 < rate_at(step, spec, total) <= 1


@pytest.mark.verifies(RATE_AT)
@pytest.mark.parametrize(
    ("step", "total", "problem"),
    [
        (-1, 10, "step=-1 is not an int of at least 0"),
        (0.5, 10, "step=0.5 is not an int of at least 0"),
        (0, 0, "total_steps=0 is not an int of at least 1"),
    ],
)
def test_bad_steps(step: int, total: int, problem: str) -> None:
    assert problem_of(lambda: rate_at(step, Rate(), total)) == problem


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"kind": "step"}, "kind='step' is not of type one of constant, cosine, wsd"),
        ({"shape": "sqrt"}, "shape='sqrt' is not of type one of linear, 1-sqrt"),
        ({"warmup": -1}, "warmup=-1 is not an int of at least 0"),
        ({"warmup": 1.5}, "warmup=1.5 is not of type int"),
        ({"decay": 0}, "decay=0 is not an int of at least 1"),
        ({"min_ratio": 1.5}, "min_ratio=1.5 is not between 0 and 1"),
        ({"min_ratio": -0.1}, "min_ratio=-0.1 is not between 0 and 1"),
        ({"min_ratio": math.nan}, "min_ratio=nan is not of type float"),
    ],
)
def test_bad_specs(values: dict[str, object], problem: str) -> None:
    assert problem_of(lambda: Rate(**values)) == problem
