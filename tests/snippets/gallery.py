"""What tests of the bug gallery share: numbers, worlds of gloo, who failed in one."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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


def some_fail(world: World, failing: Iterable[int], check: Any, *args: Any) -> None:
    """These ranks fail the check, by an assertion of the check, and no others."""
    found = failures(world, check, *args)
    assert found.keys() == set(failing), found
    assert all("AssertionError" in said for said in found.values()), found


def all_fail(world: World, check: Any, *args: Any) -> None:
    some_fail(world, range(world.size), check, *args)


def told_apart(
    worlds: Worlds, check: Any, right: Any, wrong: Any, *args: Any, sizes=(2, 3)
) -> None:
    """On these numbers of ranks the right form passes, and the broken one fails."""
    for size in sizes:
        worlds[size].run(check, right, *args)
        all_fail(worlds[size], check, wrong, *args)


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def same(found: Any, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}"
    )
