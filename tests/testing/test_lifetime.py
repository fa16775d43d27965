"""No rank and no file outlives the program that made them, however it ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing import ranks
from tests.testing.processes import alive, session, wait_until
from xtrain.evidence.results import by_symbol
from xtrain.evidence.store import Store
from xtrain.testing import RankDied, World

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PROGRAM = """
import sys
from tests.testing import ranks
from xtrain.testing import World

world = World(3)
world.run(ranks.ranks_sum)
if len(sys.argv) > 1:
    world.run(ranks.hang_after_touching, sys.argv[1])
"""

TEST_FILE = """
import os, signal
import pytest
from tests.testing import ranks

def test_hang(world):
    world(3).run(ranks.hang_after_touching, os.environ["XTRAIN_TOUCH"])

def test_worker_dies(world):
    world(3).run(ranks.ranks_sum)
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.verifies("xtrain.testing.world:World")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_fine(world, size):
    assert world(size).run(ranks.ranks_sum)
"""


@pytest.fixture
def scratch(tmp_path):
    """A place for temporary files, a place to touch, and a test file."""
    for name in ("temporary", "touched"):
        (tmp_path / name).mkdir()
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["xtrain.testing.plugin"]')
    (tmp_path / "test_inner.py").write_text(TEST_FILE)
    return tmp_path


def start(scratch: Path, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that leads its own session."""
    environment = {
        **os.environ,
        "TMPDIR": str(scratch / "temporary"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "compiler"),  # torch's, it stays
        "XTRAIN_TOUCH": str(scratch / "touched"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=scratch,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A test run in a shell's background ignores Ctrl-C; its children must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_ranks(scratch: Path) -> None:
    wait_until(lambda: len(list((scratch / "touched").iterdir())) == 3, seconds=60)


def assert_nothing_left(process: subprocess.Popen[str], scratch: Path) -> None:
    wait_until(lambda: session(process.pid) == [])
    assert list((scratch / "temporary").iterdir()) == []


def test_a_program_that_never_closes_its_world(scratch):
    process = start(scratch, "-c", PROGRAM)
    output, _ = process.communicate(timeout=300)
    assert (process.returncode, output) == (0, "")
    assert_nothing_left(process, scratch)


def test_what_a_rank_has_forked_ends_with_its_world():
    with World(2) as world:
        pids = [pid for pids in world.run(ranks.fork_and_leave, "stay") for pid in pids]
        assert all(alive(pid) for pid in pids)
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_what_a_rank_has_forked_ends_when_the_rank_is_gone():
    with World(1) as world, pytest.raises(RankDied, match="exited with code 3") as died:
        world.run(ranks.fork_and_leave, "exit")
    (said,) = re.findall(r"left \[(.*)\]", str(died.value))
    pids = [int(pid) for pid in said.split(",")]
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_program_killed_in_the_middle_of_a_run(scratch):
    process = start(scratch, "-c", PROGRAM, str(scratch / "touched"))
    wait_for_ranks(scratch)
    assert len(session(process.pid)) == 4
    process.kill()
    process.communicate(timeout=300)
    assert_nothing_left(process, scratch)


def test_ctrl_c_during_a_test(scratch):
    process = start(scratch, "-m", "pytest", "-k", "hang", "-p", "no:cacheprovider")
    wait_for_ranks(scratch)
    # The terminal sends Ctrl-C to every process of the group, ranks included.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "Traceback" not in output  # no rank cries
    assert_nothing_left(process, scratch)


def test_a_killed_xdist_worker_takes_its_ranks_along(scratch):
    """And the others' results reach the one verification record."""
    process = start(scratch, "-m", "pytest", "-n2", "-k", "dies or fine")
    output, _ = process.communicate(timeout=300)
    assert "1 failed, 3 passed" in output, output
    assert "crashed while running" in output
    wait_until(lambda: session(process.pid) == [])
    path = scratch / "build" / "verification" / "gloo-cpu.json"
    entries = Store(path, scratch).read()
    tests = by_symbol(entries)["xtrain.testing.world:World"]
    assert [(t.id, t.outcome, t.places) for t in tests] == [
        (f"test_inner.py::test_fine[{size}]", "passed", []) for size in (1, 2, 3)
    ]


def test_ranks_of_a_program_ended_by_sigterm(scratch):
    process = start(scratch, "-c", PROGRAM, str(scratch / "touched"))
    wait_for_ranks(scratch)
    process.terminate()
    process.communicate(timeout=300)
    assert_nothing_left(process, scratch)
