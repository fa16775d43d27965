"""`make verify-gpu`: its flow on gloo and a few small tests, its record as of GPUs."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.evidence.results import value_of
from xtrain.evidence.store import Entry, Store
from xtrain.testing import verify_gpu
from xtrain.testing.backend_choice import Machine

HOUSE = """
import os

def room():
    return os.getpid()

def hall():
    assert os.path.exists("open"), "closed"
"""
TESTS = """
import pytest
from house import hall, room

@pytest.mark.verifies("house:room")
@pytest.mark.parametrize("size", [1, 2])
def test_room(world, size):
    world(size).run(room)

@pytest.mark.verifies("house:hall", "house:room")
def test_hall():
    hall()

def test_without_a_mark():
    pytest.skip("not today")
"""
SLOW = """
import os
import time
import pytest

@pytest.mark.parametrize("n", range(1000))
def test_slow(n):
    time.sleep(600 if os.path.exists("hang") else 0.1)
"""


@pytest.fixture
def checkout(tmp_path):
    """A repository with a folder of tests."""
    for name, text in {
        "pytest.ini": "[pytest]\npythonpath = .\naddopts = -p no:cacheprovider\n",
        "house.py": HOUSE,
        "tests/__init__.py": "",
        "tests/conftest.py": 'pytest_plugins = ["xtrain.testing.plugin"]\n',
        "tests/comm/__init__.py": "",
        "tests/comm/test_house.py": TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def start(checkout, *words):
    """`make verify-gpu` in a terminal group of its own, on gloo."""
    src = str(Path(verify_gpu.__file__).resolve().parents[2])
    command = [sys.executable, "-m", "xtrain.testing.verify_gpu", "--backend", "gloo"]
    return subprocess.Popen(
        [*command, "-n", "1", "--to", "kept", *words],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": src},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell's job in the background ignores Ctrl-C, and all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(checkout, *words):
    run = start(checkout, *words)
    out, _ = run.communicate()
    return run.returncode, out


def kept(checkout):
    return Store(checkout / "kept" / "gloo-cpu.json", checkout)


def test_what_passed_is_kept_when_a_test_fails_and_only_the_rest_runs_again(checkout):
    code, out = finish(checkout)
    assert code == 1
    name = "tests/comm/test_house.py::test_hall"
    assert out.index("4 tests to run, in about") < out.index(f"FAILED {name}: ")
    assert "[########################] 4 of 4 tests, 1 failed, 0:00 left" in out
    assert "2 passed, 1 failed, 1 skipped; 0 had passed before" in out
    assert "not today" in out
    # `room` has passed twice, but a test that is marked with it has failed.
    assert "Nothing has passed on ranks" in out
    assert not kept(checkout).path.exists()

    (checkout / "open").touch()
    code, out = finish(checkout)
    assert code == 0
    assert "2 tests to run" in out and "2 have passed on this code and are left" in out
    assert "1 passed, 0 failed, 1 skipped; 2 had passed before" in out
    assert "1 functions and classes ran on gloo in worlds of 1, 2." in out
    assert kept(checkout).read().keys() == {
        f"tests/comm/test_house.py::test_room[{size}]" for size in (1, 2)
    }


@pytest.fixture
def slow(checkout):
    """A repository whose tests take minutes, without ranks."""
    (checkout / "tests/comm/test_house.py").write_text(SLOW)
    return checkout


def test_after_ctrl_c_what_passed_is_kept(slow):
    run = start(slow)
    lines = []
    for line in run.stdout:
        lines.append(line)
        if re.match(r"\[#\.+\] \d+ of 1,000", line):
            os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 2
    out = "".join(lines)
    left = re.search(r"(\d+) were not run: interrupted. The same command goes on", out)
    passed = Store(slow / "build/verify-gpu/gloo-cpu.json", slow).good()
    assert left and len(passed) == 1000 - int(left[1]) > 0


def test_a_run_ends_in_time_and_the_next_goes_on_even_if_a_test_hangs(slow):
    minutes, passed = 0.1, 0
    while not passed and minutes < 10:  # on a busy machine the start takes this long
        minutes *= 2
        shutil.rmtree(slow / "build", ignore_errors=True)
        code, out = finish(slow, "--minutes", str(minutes))
        found = re.search(r"(\d+) passed, 0 failed, 0 skipped; 0 had", out)
        passed = int(found[1]) if found else 0
    assert code == 0 and passed, out
    assert f"this run ends after {minutes:g} min, the next goes on" in out
    assert f"{1000 - passed} were not run: the {minutes:g} min are over" in out
    (slow / "hang").touch()
    code, out = finish(slow, "--minutes", str(minutes))
    while "tests to run" not in out and minutes < 20:  # this start may take longer
        minutes *= 2
        code, out = finish(slow, "--minutes", str(minutes))
    assert code == 0
    assert f"{1000 - passed} tests to run" in out
    assert f"{1000 - passed} were not run: the {minutes:g} min are over" in out
    assert f"{passed} have passed on this code and are left out" in out


def test_without_a_gpu_it_says_so_and_runs_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify_gpu, "this_machine", Machine)
    assert verify_gpu.main([]) == 2
    out = capsys.readouterr().out
    assert "needs a GPU that torch can see; there is none" in out
    assert "xtrain doctor says what this machine has" in out
    assert list(tmp_path.iterdir()) == []


# --- the record -----------------------------------------------------------------------

ABOUT = {
    "backend": "nccl", "device": "cuda", "torch": "2.13.0", "nccl": "2.30.7",
    "gpus": 2, "gpu": "NVIDIA H200", "platform": "Linux, 2 x NVIDIA H200, NCCL 2.30.7",
}  # fmt: skip


def test_the_record_of_gpus_says_which_worlds_shared_them_and_what_failed(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    now = Entry.now([tmp_path / "t.py"], tmp_path)
    store = Store(tmp_path / "nccl-cuda.json", tmp_path)
    store.write(
        {
            f"t.py::{name}": now.with_value(value_of(outcome, 1.0, ran))
            for name, outcome, ran in (
                ("one", "passed", {"a:b": [("nccl", 1), ("nccl", 4)], "a:c": None}),
                ("two", "passed", {"a:wrong": [("nccl", 2)], "a:b": [("nccl", 2)]}),
                ("own", "passed", {"a:b": []}),
                ("skipped", "skipped", {"a:b": None}),
                ("bad", "failed", {"a:wrong": [("nccl", 2)]}),
                ("unmarked", "passed", {}),
            )
        },
        ABOUT,
    )
    said = verify_gpu.keep(store, tmp_path / "to")
    found = Store(tmp_path / "to/nccl-2-nvidia-h200.json", tmp_path)
    assert {n: e.value["ran"] for n, e in found.read().items()} == {
        "t.py::one": {"a:b": [["nccl", 1], ["nccl", 4]]},
        "t.py::two": {"a:b": [["nccl", 2]]},
    }
    extra = {"world_sizes": [1, 2, 4], "shared": [4], "failed": ["t.py::bad"]}
    assert found.about() == ABOUT | extra
    assert "1 functions and classes ran on nccl in worlds of 1, 2, 4." in said
    assert "open a pull request" in said


@pytest.mark.parametrize(
    ("fact", "other"), [("gpus", 1), ("nccl", "2.29.7"), ("torch", "2.14.0")]
)
def test_results_of_another_machine_are_not_taken_for_ours(tmp_path, fact, other):
    store = Store(tmp_path / "nccl-cuda.json", tmp_path)
    store.write({}, ABOUT)
    verify_gpu.drop_other_machines(store, dict(ABOUT))
    assert store.path.exists()
    verify_gpu.drop_other_machines(store, ABOUT | {fact: other})
    assert not store.path.exists()


# --- the tests that it runs -----------------------------------------------------------


def test_the_folders_are_there(request):
    tests = request.config.rootpath / "tests"
    assert all((tests / name).is_dir() for name in verify_gpu.FOLDERS)


ON_CPUS = {"backends", "bench", "cli", "docs", "faults", "plan"}  # gloo, and ours


def test_every_folder_that_takes_the_sessions_ranks_is_known(request):
    taken = {
        path.parent.name
        for path in (request.config.rootpath / "tests").glob("*/test_*.py")
        if re.search(r"def test_\w+\([^)]*\bworld\b", path.read_text())
    }
    assert taken == {*verify_gpu.FOLDERS, *ON_CPUS}


DRAWS = ("torch.", "nn.init.")


def nowhere(text: str) -> list[str]:
    """Draws from a generator that name no device: on a rank with a GPU, a CPU's
    generator would meet the GPU as the default device, which torch refuses. Those of
    `nn.init` cannot name one: they draw where the tensor is."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func).startswith(DRAWS)
        and {"generator"} == {"generator", "device"} & {k.arg for k in call.keywords}
    ]


def test_what_ranks_draw_from_a_generator_says_where(request):
    root = request.config.rootpath
    files = [*root.glob("src/xtrain_docs/matrix/*.py"), *root.glob("tests/*.py")]
    for name in verify_gpu.FOLDERS:
        files += (root / "src/xtrain" / name).rglob("*.py")
        files += (root / "tests" / name).rglob("*.py")
    files.remove(root / "tests/testing/test_pretended_device.py")  # draws wrongly, too
    assert len(files) > 300
    assert {str(f): n for f in files if (n := nowhere(f.read_text()))} == {}
    assert nowhere("torch.rand(2, generator=g)") == ["torch.rand(2, generator=g)"]
    assert nowhere("nn.init.normal_(w, generator=g)")
    assert nowhere("torch.rand(2, generator=g, device='cpu'); torch.rand(2)") == []
