"""The pytest plugin, seen by running pytest on small test files."""

import platform
import sys

import pytest

# pytester forgets what an inner run imported; this must not be imported twice.
import torch._dynamo  # noqa: F401

from xtrain.evidence.results import by_symbol
from xtrain.evidence.store import Store
from xtrain.testing import backend_choice, plugin
from xtrain.testing.backend_choice import Machine

CONFTEST = 'pytest_plugins = ["xtrain.testing.plugin"]'
INI = """
[pytest]
pythonpath = .
addopts = --strict-markers -p no:cacheprovider
"""


@pytest.fixture
def project(pytester):
    """A repository with tests and a module `house` to verify."""
    pytester.makeini(INI)
    pytester.makepyfile(
        house="import os\n\n\ndef room():\n    return os.getpid()\n\n\n"
        "def hall(open):\n    assert open\n"
    )
    pytester.makeconftest(CONFTEST)

    def write(text: str) -> pytest.Pytester:
        pytester.makepyfile(
            test_house="import os, pytest\nfrom house import room, hall\n" + text
        )
        return pytester

    return write


def read_record(pytester):
    path = pytester.path / "build" / "verification" / "gloo-cpu.json"
    return Store(path, pytester.path)


VERIFYING = """
@pytest.mark.verifies("house:room")
@pytest.mark.parametrize("size", [1, 2])
def test_room(world, size):
    assert len(world(size).run(room)) == size

@pytest.mark.verifies("house:room", "house:hall")
def test_hall():
    hall(HALL)

@pytest.mark.verifies("house:hall")
def test_skipped():
    pytest.skip("not today")

def test_unmarked():
    pass
"""


def outcomes(record, symbol):
    """The tests marked with a symbol: how they ended, and where they ran it."""
    return {
        name.partition("::")[2]: (entry.value["outcome"], entry.value["ran"][symbol])
        for name, entry in record.good().items()
        if symbol in entry.value["ran"]
    }


def check_first_record(pytester):
    record = read_record(pytester)
    about = record.about()
    assert (about["backend"], about["device"]) == ("gloo", "cpu")
    assert about["created"].endswith("+00:00")
    assert about["python"] == ".".join(map(str, sys.version_info[:3]))
    # No kernel release: the same on every machine of one kind.
    assert about["platform"] == f"{platform.system()} {platform.machine()}"
    assert outcomes(record, "house:room") == {
        "test_room[1]": ("passed", [["gloo", 1]]),
        "test_room[2]": ("passed", [["gloo", 2]]),
        "test_hall": ("passed", None),  # marked with it, and does not run it
    }
    assert "test_hall" not in str(by_symbol(record.good())["house:room"])
    assert outcomes(record, "house:hall") == {
        "test_hall": ("passed", []), "test_skipped": ("skipped", None)
    }  # fmt: skip
    assert record.read()["test_house.py::test_room[2]"].value["seconds"] > 0


def test_a_run_writes_the_record_and_a_partial_run_merges(project, monkeypatch):
    pytester = project("HALL = True\n" + VERIFYING)
    monkeypatch.syspath_prepend(pytester.path)
    pytester.runpytest_inprocess("-k", "not test_hall")
    pytester.runpytest_inprocess("-k", "test_hall").assert_outcomes(
        passed=1, deselected=4
    )
    check_first_record(pytester)

    project("HALL = False\n" + VERIFYING)
    pytester.runpytest_inprocess("-k", "test_hall").assert_outcomes(
        failed=1, deselected=4
    )
    record = read_record(pytester)
    assert outcomes(record, "house:hall") == {"test_hall": ("failed", [])}
    # The file of tests has changed, so its other results are of the past.
    assert outcomes(record, "house:room").keys() == {"test_hall"}


def test_all_results_can_be_kept_while_they_come(project, monkeypatch):
    """What a run that is killed leaves behind; the default record is not touched."""
    pytester = project(
        "import json\n@pytest.mark.verifies('house:room')\ndef test_a(): room()\n"
        "def test_b(): pass\n"
        "def test_c():\n"
        "    names = json.load(open('build/here/gloo-cpu.json'))['entries']\n"
        "    assert [n[-1] for n in names] == ['a', 'b']\n"
    )
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setattr("xtrain.evidence.recorder.WRITE_SECONDS", 0.0)
    words = ("--backend", "gloo", "--record-all", "here")
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=3)
    assert not read_record(pytester).path.exists()


def test_worlds_beyond_the_memory_of_the_gpu_are_skipped(project, monkeypatch):
    pytester = project("def test_it(world):\n    world(8)\n")
    monkeypatch.setattr(plugin, "this_machine", lambda: Machine(1, (2, 30, 7)))
    words = ("--backend", "nccl", "--ranks-per-gpu", "5", "-rs")
    result = pytester.runpytest_inprocess(*words)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *: 8 ranks put 8 on a GPU, *enough for 5"])


def test_what_is_edited_while_its_test_runs_is_not_proved(project, monkeypatch):
    pytester = project(
        "@pytest.mark.verifies('house:room')\ndef test_it():\n    room()\n"
        "    with open('house.py', 'a') as file:\n        file.write('# later')\n"
    )
    monkeypatch.syspath_prepend(pytester.path)
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    record = read_record(pytester)
    assert (len(record.read()), len(record.good())) == (1, 0)


def test_a_mark_on_a_symbol_that_is_not_there_fails_its_test(project, monkeypatch):
    pytester = project("@pytest.mark.verifies('house:attic')\ndef test_it(): pass\n")
    monkeypatch.syspath_prepend(pytester.path)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*verifies: 'house:attic': *defines no 'attic'*"])
    assert not (pytester.path / "build").exists()


def test_world_size_runs_at_all_sizes_unless_marked(project):
    pytester = project(
        "def test_all(world_size): pass\n"
        "@pytest.mark.world_sizes(2, 4)\n"
        "def test_some(world_size): pass\n"
    )
    result = pytester.runpytest_inprocess("--collect-only", "-q")
    names = [line.partition("::")[2] for line in result.outlines if "::" in line]
    assert names == [f"test_all[{size}]" for size in plugin.WORLD_SIZES] + [
        "test_some[2]",
        "test_some[4]",
    ]


def test_the_header_says_what_was_chosen(project, monkeypatch):
    pytester = project("def test_it(): pass\n")
    monkeypatch.setattr(plugin, "this_machine", Machine)
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["xtrain: ranks on gloo, cpu (no GPU)"])
    monkeypatch.setattr(plugin, "this_machine", lambda: Machine(1, (2, 30, 7)))
    result = pytester.runpytest_inprocess("--backend", "nccl")
    result.stdout.fnmatch_lines(
        [
            "xtrain: ranks on nccl, cuda (as asked)",
            "xtrain: worlds larger than 1 share GPUs: NCCL_MULTI_RANK_GPU_ENABLE=1 *",
        ]
    )


NO_CUDA_HERE = """
import os

import torch

pytest_plugins = ["xtrain.testing.plugin"]
PARENT = os.getpid()


def ask_cuda(*_):
    if os.getpid() == PARENT:
        raise AssertionError("CUDA was asked in the process that forks")
    return 2


torch.backends.cuda.is_built = lambda: True
torch.cuda.is_available = torch.cuda.device_count = ask_cuda
torch.cuda._lazy_init = ask_cuda
torch.cuda.get_device_name = lambda _: ask_cuda() and "a GPU"
"""
SEES_NONE = """
import os

def visible():
    return os.environ["CUDA_VISIBLE_DEVICES"]

def test_it(world):
    assert [visible(), *world(2).run(visible)] == [""] * 3
"""


def test_gpus_beside_the_tests_are_counted_in_a_child_and_hidden(project, monkeypatch):
    pytester = project(SEES_NONE)
    pytester.makeconftest(NO_CUDA_HERE)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["xtrain: ranks on gloo, cpu (2 of 4 GPUs; *"])


COUNTS_TWO = """
from xtrain.testing.backend_choice import this_machine

def test_it():
    assert (this_machine().gpus, this_machine().visible) == (2, "0,1")
"""


def test_the_test_processes_of_xdist_see_the_gpus_too(project, monkeypatch):
    pytester = project(COUNTS_TWO)
    pytester.makeconftest(NO_CUDA_HERE)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    pytester.runpytest_subprocess("-n", "1").assert_outcomes(passed=1)


def test_ranks_on_gpus_see_those_that_were_visible(project, monkeypatch):
    pytester = project("def test_it(): pass\n")
    pytester.makeconftest(
        NO_CUDA_HERE
        + """
from xtrain.testing.backend_choice import Choice, rank_environment, this_machine

def pytest_unconfigure():
    machine, choice = this_machine(), Choice("nccl", "cuda", "")
    print(machine.name, rank_environment(2, choice, machine))
"""
    )
    for given, seen in ((None, "0,1"), ("3,5", "3,5")):
        if given:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        result = pytester.runpytest_subprocess()
        result.stdout.fnmatch_lines([f"a GPU {{'CUDA_VISIBLE_DEVICES': '{seen}'}}"])


def test_worlds_that_do_not_fit_are_skipped_in_one_line(project, monkeypatch):
    pytester = project("def test_it(world):\n    world(4)\n")
    monkeypatch.setattr(plugin, "this_machine", lambda: Machine(2, (2, 29, 7)))
    result = pytester.runpytest_inprocess("--backend", "nccl", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED *: 4 ranks need 4 GPUs, there are 2: sharing one needs "
            "NCCL 2.30 or newer, found 2.29.7"
        ]
    )


def test_an_impossible_choice_stops_the_run(project, monkeypatch):
    pytester = project("def test_it(): pass\n")
    monkeypatch.setattr(plugin, "this_machine", Machine)
    result = pytester.runpytest_inprocess("--backend", "nccl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *needs a GPU that torch can see*"])


def test_the_plugin_and_the_choice_agree_on_backends():
    assert set(backend_choice.LATE_BACKENDS) < set(backend_choice.BACKENDS)
