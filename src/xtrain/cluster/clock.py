"""A rank's virtual time: `advance` lets it compute."""

import math

from xtrain.cluster import running


def advance(seconds: float) -> None:
    """Let this rank compute for virtual seconds; messages go on meanwhile.

    Outside of a cluster it does nothing.
    """
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"advance: {seconds} is not a number of seconds")
    cluster = running.cluster()
    if cluster is not None:
        cluster.advance(seconds)


def now() -> float:
    """This rank's clock: virtual seconds since its start; 0 outside of a cluster."""
    cluster = running.cluster()
    return 0.0 if cluster is None else cluster.scheduler.current.clock
