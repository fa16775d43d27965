"""A whole run: intervals by Young and Daly, goodput, days and dollars."""

import random
from math import exp, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan import (
    daly_interval,
    goodput,
    time_between_failures,
    whole_run,
    young_interval,
)
from xtrain.plan.whole_run import DEVICE_MTBF

ROOM = "xtrain.plan.whole_run"
HOUR = 3600.0


@pytest.mark.verifies(f"{ROOM}:time_between_failures")
def test_llama_3_fails_every_three_hours():
    """419 unexpected interruptions of 16,384 devices in 54 days."""
    assert time_between_failures(16384) / HOUR == pytest.approx(54 * 24 / 419)
    assert time_between_failures(8) / time_between_failures(16) == 2
    assert 5.5 < DEVICE_MTBF / (365.25 * 24 * HOUR) < 6


@pytest.mark.verifies(f"{ROOM}:young_interval", f"{ROOM}:daly_interval")
def test_intervals():
    assert young_interval(60, 3 * HOUR) == sqrt(2 * 60 * 3 * HOUR)
    assert daly_interval(60, 3 * HOUR) == pytest.approx(
        young_interval(60, 3 * HOUR) - 60, rel=0.03
    )
    assert daly_interval(100, 50) == 50  # a checkpoint takes too long


@pytest.mark.verifies(f"{ROOM}:daly_interval", f"{ROOM}:goodput")
@given(st.floats(1, 600), st.floats(3600, 1e6), st.floats(0, 3600))
def test_dalys_interval_is_within_a_thousandth_of_the_best(c, m, r):
    chosen = goodput(daly_interval(c, m), c, m, r)
    around = [
        goodput(young_interval(c, m) * 2 ** (k / 8), c, m, r) for k in range(-24, 25)
    ]
    assert chosen >= 0.997 * max(around)
    assert 0 < chosen < 1


@pytest.mark.verifies(f"{ROOM}:goodput")
def test_goodput_is_that_of_a_drawn_run():
    """Failures drawn at a constant rate, in work, checkpoints and restarts alike."""
    interval, c, m, r = 1800.0, 120.0, 5 * HOUR, 900.0
    draw = random.Random(1)
    wall = kept = 0.0
    for _ in range(20_000):
        needed = interval + c
        while True:
            until = draw.expovariate(1 / m)
            if until >= needed:
                wall += needed
                break
            wall += until
            needed = interval + c + r  # restart, then the segment anew
        kept += interval
    assert goodput(interval, c, m, r) == pytest.approx(kept / wall, rel=0.01)
    assert goodput(interval, 0, 1e12, 0) == pytest.approx(1)
    assert goodput(interval, 0, m, 0) > exp(-interval / m)


@pytest.mark.verifies(f"{ROOM}:whole_run", f"{ROOM}:WholeRun")
def test_days_and_dollars():
    run = whole_run(1e6, 1e12, 64, 8 * 10**9, price=2.0)
    assert run.days == pytest.approx(1e6 / 86400 / run.goodput)
    assert run.dollars == pytest.approx(2 * 64 * 24 * run.days)
    assert run.chinchilla == 160e9 and run.failures < 2
    assert whole_run(1e6, 1e12, 64, 1).dollars is None
    many = whole_run(1e6, 1e12, 16384, 1)
    assert many.goodput < run.goodput and many.failures > run.failures


@pytest.mark.verifies(f"{ROOM}:whole_run", f"{ROOM}:goodput")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"price": -1}, "price=-1"),
        ({"tokens": 0}, "tokens=0"),
        ({"gpus": 0}, "gpus=0"),
        ({"checkpoint": 0}, "checkpoint=0"),
        ({"restart": -1}, "restart=-1"),
        ({"tokens_per_second": 0}, "tokens_per_second=0"),
        ({"device_mtbf": 0}, "device=0"),
    ],
)
def test_bad_input(options, said):
    given_ = {"tokens_per_second": 1.0, "tokens": 1.0, "gpus": 8, "parameters": 1}
    with pytest.raises(ValueError, match=said):
        whole_run(**given_ | options)
