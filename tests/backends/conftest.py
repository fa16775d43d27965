"""Worlds on the backends under test, whatever backend the session verifies."""

from collections.abc import Callable, Iterator

import pytest

from xtrain.testing import World
from xtrain.testing.world import Worlds

OURS = ("xtrain-shm", "xtrain-socket")

# For what holds under NCCL's rules, too.
and_under_nccl_rules = pytest.mark.parametrize("backend", [*OURS, "nccl-rules"])


@pytest.fixture(scope="session")
def worlds_of() -> Iterator[Callable[[str], Worlds]]:
    """`worlds_of(backend)`: living ranks of each backend, a few at a time."""
    # DTensor, functional collectives and optimizers import this at their first use:
    # once here, before the ranks are forked, rather than in each of them.
    import torch._dynamo  # noqa: F401

    made: dict[str, Worlds] = {}

    def get(backend: str) -> Worlds:
        if backend not in made:
            made[backend] = Worlds(backend, "cpu", max_ranks=10)
        return made[backend]

    yield get
    for worlds in made.values():
        worlds.close()


@pytest.fixture(params=OURS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ours(backend, worlds_of) -> Callable[[int], World]:
    """`ours(size)`: ranks on the backend of this test."""

    def get(size: int) -> World:
        return worlds_of(backend).get(size)

    return get
