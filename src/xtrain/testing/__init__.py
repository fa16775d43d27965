"""Ranks for tests, practice and benchmarks.

::

    with World(4) as world:
        sums = world.run(sum_of_ranks)  # one result per rank
"""

from xtrain.testing.errors import RankDied, RankError, RankReport, RankTimeout
from xtrain.testing.expect import expect_error
from xtrain.testing.script import run_script
from xtrain.testing.world import World

__all__ = [
    "RankDied",
    "RankError",
    "RankReport",
    "RankTimeout",
    "World",
    "expect_error",
    "run_script",
]
