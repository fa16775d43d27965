"""What the tests of the bug gallery share: worlds of gloo, and who failed in one."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from xtrain.testing import RankError, World


class Worlds(dict[int, World]):
    """gloo on the CPU, whatever backend this session verifies."""

    def __missing__(self, size: int) -> World:
        self[size] = World(size)
        return self[size]


def ranks() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def failures(
    world: World, check: Callable[..., Any], *args: Any, timeout: float = 30.0
) -> dict[int, str]:
    """What each rank that did not pass has to say."""
    try:
        world.run(check, *args, timeout=timeout)
    except RankError as error:
        return {r.rank: r.summary for r in error.reports if r.kind != "returned"}
    return {}
