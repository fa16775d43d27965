"""The worlds of the bug gallery, and torch's compiler, loaded before ranks fork."""

from collections.abc import Iterator

import pytest
import torch._dynamo  # noqa: F401  (optimizers import it at their first use)

from tests.snippets.gallery import Worlds


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    for world in worlds.values():
        world.close()
