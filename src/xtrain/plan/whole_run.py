"""A whole run: days, dollars, failures, checkpoints, and the batch it can use.

    days          tokens / (tokens a second x goodput) / 86400
    failures      one every M = M1 / n, of n devices that fail every M1 each
    interval      sqrt(2 c M)                          Young; c seconds a checkpoint
                  sqrt(2 c M) (1 + x/3 + x^2/9) - c    Daly, x = sqrt(c / (2 M))
    goodput       exp(-r / M) t / (M (exp((t + c) / M) - 1))
                  t between checkpoints, r to restart: Daly's expected time
    Chinchilla    20 tokens a parameter

Sources: Young, CACM 17(9), 1974; Daly, Future Generation Computer Systems 22(3), 2006;
Grattafiori et al., 2024, section 3.3.4 (419 unexpected interruptions in 54 days of
16,384 devices); Hoffmann et al., 2022 (20 tokens a parameter).
"""

from math import exp, expm1, sqrt
from typing import NamedTuple

from xtrain.plan.checks import require_positive, require_whole

DAY = 86400.0
DEVICE_MTBF = 16384 * 54 * DAY / 419
"""Seconds between failures of one device: Llama 3's run, about 5.8 years."""
CHINCHILLA = 20


def time_between_failures(gpus: int, device: float = DEVICE_MTBF) -> float:
    """Seconds, of so many devices that fail every `device` seconds each."""
    require_whole("gpus", gpus)
    require_positive("device", device)
    return device / gpus


def young_interval(checkpoint: float, failures: float) -> float:
    """Seconds of work between checkpoints that take `checkpoint` seconds each."""
    require_positive("checkpoint", checkpoint)
    require_positive("failures", failures)
    return sqrt(2 * checkpoint * failures)


def daly_interval(checkpoint: float, failures: float) -> float:
    """Young's, corrected where a checkpoint is not short against a failure.

    If it takes more than twice the time between failures, that time.
    """
    young = young_interval(checkpoint, failures)
    if checkpoint >= 2 * failures:
        return failures
    share = sqrt(checkpoint / (2 * failures))
    return young * (1 + share / 3 + share**2 / 9) - checkpoint


def goodput(
    interval: float, checkpoint: float, failures: float, restart: float
) -> float:
    """Share of the time that goes into steps which are kept.

    Args:
        interval: seconds of work between checkpoints.
        checkpoint: seconds of one, while nothing is computed.
        failures: mean seconds between them; they come at any time.
        restart: seconds from a failure until work goes on.
    """
    for name, value in (("interval", interval), ("failures", failures)):
        require_positive(name, value)
    if checkpoint < 0 or restart < 0:
        raise ValueError(f"checkpoint={checkpoint} and restart={restart}: at least 0")
    wall = (
        failures * exp(restart / failures) * expm1((interval + checkpoint) / failures)
    )
    return interval / wall


class WholeRun(NamedTuple):
    """A run of so many tokens."""

    tokens: float
    days: float
    dollars: float | None
    """By the price of a device hour, where one is given."""
    failures: float
    """How many are expected."""
    interval: float
    """Seconds of work between checkpoints, by Daly."""
    goodput: float
    chinchilla: float
    """Tokens for the model's active parameters."""


def whole_run(
    tokens_per_second: float,
    tokens: float,
    gpus: int,
    parameters: int,
    *,
    price: float | None = None,
    checkpoint: float = 60.0,
    restart: float = 600.0,
    device_mtbf: float = DEVICE_MTBF,
) -> WholeRun:
    """Days, dollars and failures.

    Args:
        tokens_per_second: of all devices together, while they work.
        parameters: that a token uses.
        price: dollars for an hour of one device.
        checkpoint: seconds that a checkpoint stops the work.
        restart: seconds from a failure to the next step.
    """
    require_positive("tokens_per_second", tokens_per_second)
    require_positive("tokens", tokens)
    if price is not None:
        require_positive("price", price)
    between = time_between_failures(gpus, device_mtbf)
    interval = daly_interval(checkpoint, between)
    share = goodput(interval, checkpoint, between, restart)
    seconds = tokens / tokens_per_second / share
    dollars = None if price is None else price * gpus * seconds / 3600
    return WholeRun(
        tokens,
        seconds / DAY,
        dollars,
        seconds / between,
        interval,
        share,
        CHINCHILLA * parameters,
    )
