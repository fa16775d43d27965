"""pytest plugin: options, the `world` fixture, and the recorder of what is verified.

    def test_sum(world, world_size):          # runs at 1, 2, 3, 4 and 8 ranks
        sums = world(world_size).run(sum_of_ranks)

Load it with `pytest_plugins = ["xtrain.testing.plugin"]` in the top conftest.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xtrain.evidence import results
from xtrain.evidence.recorder import Recorder
from xtrain.testing import pretended_device
from xtrain.testing.about import about
from xtrain.testing.backend_choice import (
    BACKENDS,
    DEVICES,
    VIRTUAL,
    Choice,
    Machine,
    choose,
    explain_sharing,
    rank_environment,
    this_machine,
)
from xtrain.testing.world import MAX_RANKS, World, Worlds

WORLD_SIZES = (1, 2, 3, 4, 8)
_CHOICE = pytest.StashKey[Choice]()
_MACHINE = pytest.StashKey[Machine]()

_MARKERS = (
    "verifies(*symbols): the test proves these symbols, 'package.module:name'",
    "world_sizes(*sizes): the values of the world_size argument of this test",
    "processes(why): ranks have to be processes: skipped where they are threads",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("xtrain", "ranks of xtrain.testing")
    group.addoption(
        "--backend",
        choices=BACKENDS,
        help="process-group backend (default: nccl with enough GPUs, else gloo)",
    )
    group.addoption(
        "--device",
        choices=DEVICES,
        help="device of the ranks (default: the one of the backend); xgpu pretends one",
    )
    group.addoption(
        "--ranks-per-gpu",
        type=int,
        metavar="N",
        help="skip worlds that put more ranks on a GPU, whose memory is full then",
    )
    group.addoption(
        "--record-all",
        metavar="FOLDER",
        help="keep the result of every test in a folder of build/, while they come in",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Ranks are forked, and a fork of several OpenMP threads can hang.
    torch.set_num_threads(1)
    _let_others_finish()
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    machine = replace(this_machine(), fits=config.option.ranks_per_gpu)
    if config.getoption("dist", "no") == "no":  # else ask again where tests run
        # From this process, which forks: backward() here would start threads for
        # them, and autograd refuses to work in a fork of such a process. Ranks see
        # them again.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        choice = choose(config.option.backend, config.option.device, machine)
        if choice.device == pretended_device.NAME:
            pretended_device.build()
    except (ValueError, RuntimeError) as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_CHOICE], config.stash[_MACHINE] = choice, machine
    every = config.option.record_all
    path = Path(every or results.FOLDER, f"{choice.backend}-{choice.device}.json")
    recorder = Recorder(config, path, lambda: about(choice, machine), bool(every))
    config.pluginmanager.register(recorder, "xtrain recorder")


def _let_others_finish() -> None:
    """A thread that wakes, here and in all ranks, waits for the one that runs.

    gloo's event thread spins while another thread of its rank holds a lock. On few
    cores it would interrupt that thread and spin for the rest of its time slice.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_report_header(config: pytest.Config) -> list[str]:
    choice, machine = config.stash[_CHOICE], config.stash[_MACHINE]
    lines = [f"xtrain: ranks on {choice.backend}, {choice.device} ({choice.reason})"]
    sharing = explain_sharing(choice, machine)
    return lines + ([f"xtrain: {sharing}"] if sharing else [])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world_size" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("world_sizes")
        metafunc.parametrize("world_size", mark.args if mark else WORLD_SIZES)


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("processes")
    if mark and item.config.stash[_CHOICE].backend == VIRTUAL:
        pytest.skip(f"needs processes: {mark.args[0]}")


@pytest.fixture(scope="session")
def xtrain_worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """All living ranks of this test process."""
    # Optimizers, DDP and DTensor import this at their first use, 0.8 s: once here,
    # before the first fork, rather than once per rank.
    import torch._dynamo  # noqa: F401

    choice = request.config.stash[_CHOICE]
    fits = request.config.stash[_MACHINE].fits or MAX_RANKS
    worlds = Worlds(choice.backend, choice.device, min(fits, MAX_RANKS))
    yield worlds
    worlds.close()


@pytest.fixture
def world(
    request: pytest.FixtureRequest, xtrain_worlds: Worlds
) -> Callable[[int], World]:
    """`world(size)`: living ranks on the backend and device of this session.

    Skips the test when `size` ranks do not fit on the GPUs.
    """
    choice, machine = request.config.stash[_CHOICE], request.config.stash[_MACHINE]

    def get(size: int) -> World:
        try:
            rank_environment(size, choice, machine)
        except ValueError as misfit:
            pytest.skip(str(misfit))
        return xtrain_worlds.get(size)

    return get
