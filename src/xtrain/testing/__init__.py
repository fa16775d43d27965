"""Ranks for tests, practice and benchmarks.

    with World(4) as world:
        sums = world.run(all_reduce_of_ranks)    # one result per rank
"""

from xtrain.testing.errors import RankDied, RankError, RankReport, RankTimeout
from xtrain.testing.world import World

__all__ = ["RankDied", "RankError", "RankReport", "RankTimeout", "World"]
