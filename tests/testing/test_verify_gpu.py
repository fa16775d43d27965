"""`make verify-gpu`, as far as a machine without a GPU can tell."""

import ast
import re
import subprocess

import pytest

from xtrain.evidence import verify_gpu
from xtrain.evidence.results import value_of
from xtrain.evidence.store import Entry, Store

ABOUT = {"platform": "Linux, 1 x NVIDIA H200, NCCL 2.28.9", "torch": "2.11.0"}
ENTRIES = {
    "t::one": Entry("k", "2.11", (), value_of("passed", 1, {"a:ran": [], "a:b": None})),
    "t::two": Entry("k", "2.11", (), value_of("skipped", 0, {"a:ran": None})),
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder where pytest is only pretended to run, and leaves a record."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests/comm").mkdir(parents=True)
    asked = []

    def run(command):
        asked.append(command)
        written = tmp_path / "build/verification/nccl-cuda.json"
        Store(written, tmp_path).write(ENTRIES, ABOUT)
        return subprocess.CompletedProcess(command, verify_gpu_code[0])

    verify_gpu_code = [0]
    monkeypatch.setattr(verify_gpu.subprocess, "run", run)
    monkeypatch.setattr(verify_gpu.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(verify_gpu.dist, "is_nccl_available", lambda: True)
    return asked, verify_gpu_code, tmp_path


@pytest.mark.parametrize("lacks", ["torch.cuda.device_count", "dist.is_nccl_available"])
def test_without_a_gpu_it_says_so_and_runs_nothing(
    checkout, capsys, monkeypatch, lacks
):
    monkeypatch.setattr(f"xtrain.evidence.verify_gpu.{lacks}", lambda: 0)
    assert verify_gpu.main([]) == 2
    assert "xtrain doctor says what is missing" in capsys.readouterr().out
    assert checkout[0] == []


def test_one_gpu_is_enough_and_every_skip_has_its_reason(checkout, capsys):
    asked, _, folder = checkout
    assert verify_gpu.main(["-k", "ring"]) == 0
    ((_, _, _, *words),) = asked
    assert words[-3:] == ["tests/comm", "-k", "ring"]
    assert "nccl" in words
    out = capsys.readouterr().out
    assert "-rs" in words  # pytest tells why it skips
    assert "1 functions and classes ran under NCCL" in out
    kept = folder / "docs/data/verification/nccl-nvidia-h200.json"
    assert Store(kept, folder).read() == ENTRIES
    assert Store(kept, folder).about() == ABOUT
    assert "open a pull request" in out


def test_a_run_that_failed_is_not_kept(checkout, capsys):
    _, code, folder = checkout
    code[0] = 1
    assert verify_gpu.main([]) == 1
    out = capsys.readouterr().out
    assert "pull request" not in out
    assert "Not kept, as a test failed" in out
    assert not (folder / "docs").exists()


def test_the_folders_are_there(request):
    tests = request.config.rootpath / "tests"
    assert all((tests / name).is_dir() for name in verify_gpu.FOLDERS)


ON_CPUS = {"backends", "bench", "docs", "plan"}  # gloo, and ours


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
    assert len(files) > 300
    assert {str(f): n for f in files if (n := nowhere(f.read_text()))} == {}
    assert nowhere("torch.rand(2, generator=g)") == ["torch.rand(2, generator=g)"]
    assert nowhere("nn.init.normal_(w, generator=g)")
    assert nowhere("torch.rand(2, generator=g, device='cpu'); torch.rand(2)") == []
