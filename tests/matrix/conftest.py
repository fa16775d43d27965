"""Optimizers import torch's compiler at their first use: here, not in each rank."""

from collections.abc import Callable, Iterator

import pytest
import torch._dynamo  # noqa: F401

from xtrain.testing import World
from xtrain.testing.world import Worlds


@pytest.fixture(scope="module", params=("xtrain-shm", "xtrain-socket"))
def ours(request) -> Iterator[Callable[[int], World]]:
    """`ours(size)`: ranks on a backend of ours, whatever the session verifies."""
    worlds = Worlds(request.param, "cpu", max_ranks=10)
    yield worlds.get
    worlds.close()
