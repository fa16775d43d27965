"""pytest plugin: the `world` fixture and the options that choose what is verified."""

from collections.abc import Callable, Iterator

import pytest

from xtrain.testing.world import World


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("xtrain")
    group.addoption("--backend", default="gloo", help="process-group backend")
    group.addoption("--device", default="cpu", help="device of the ranks")


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)
    config.addinivalue_line(
        "markers",
        "verifies(*symbols): the test proves these symbols, 'package.module:name'",
    )


@pytest.fixture(scope="session")
def _worlds(request: pytest.FixtureRequest) -> Iterator[dict[int, World]]:
    worlds: dict[int, World] = {}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture
def world(
    request: pytest.FixtureRequest, _worlds: dict[int, World]
) -> Callable[[int], World]:
    """`world(size)`: a running World on the backend and device of this session."""
    backend = request.config.getoption("--backend")
    device = request.config.getoption("--device")

    def get(size: int) -> World:
        if size not in _worlds:
            _worlds[size] = World(size, backend, device)
        return _worlds[size]

    return get
