"""Every snippet prints what its transcript says, and keeps to the house's rules.

snippets/lc1/ring_all_reduce.py     a program a reader runs
snippets/lc1/ring_all_reduce.out    what it printed, rank by rank
snippets/wrong/lc1/...              broken on purpose; the .out shows the symptom

A snippet asks torch for the backend of its device, so `--backend xtrain-shm` runs all
that do on that one, and `--device xgpu` on pretended GPUs, with the same transcripts.
With `--backend nccl` those that fit on the GPUs have to end well: a GPU draws other
random numbers.
"""

import ast
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

from xtrain.testing import run_script
from xtrain.testing.backend_choice import Choice, choose, this_machine
from xtrain.testing.script import read_command

ROOT = Path(__file__).parents[2]
SNIPPETS = sorted((ROOT / "snippets").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SNIPPETS]

# These look at TCP counters, which only Linux has.
LINUX_ONLY = ("snippets/lc1/ledger.py",)

# These print what only gloo does.
ABOUT_GLOO = {
    "snippets/lc1/process_group.py": "prints the name of the backend",
    "snippets/lc1/two_backends.py": "prints the names of its backends",
    "snippets/lc4/ring_matmul.py": "counts messages in place of gloo's collectives",
    "snippets/wrong/lc1/read_after_reduce.py": "prints the partial sums that gloo left",
}


# This prints more where the tensors are on the CPU.
ON_CPUS = {"snippets/lc4/embedding.py": "looks for wrong ids on the CPU alone"}


@pytest.fixture
def choice(request) -> Choice:
    """What is asked for, else gloo and the CPU: transcripts are of these."""
    backend, device = request.config.option.backend, request.config.option.device
    asked = backend or device
    return choose(backend if asked else "gloo", device, this_machine())


@pytest.fixture(autouse=True)
def started_from_the_root(monkeypatch):
    """Transcripts' paths are seen from the root.

    The plugin hides GPUs from this process and from the scripts that it starts.
    """
    monkeypatch.chdir(ROOT)
    # A snippet may start processes of its own.
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_run_prints_the_transcript(name, choice):
    if name in LINUX_ONLY and sys.platform != "linux":
        pytest.skip("needs the TCP counters of Linux")
    backend, device = choice.backend, choice.device
    if (backend, device) != ("gloo", "cpu"):
        skip_what_says_nothing_about(backend, device, name)
    printed = "".join(run_script(name, 300, backend, device))
    assert device == "cuda" or printed == Path(name).with_suffix(".out").read_text()


def skip_what_says_nothing_about(backend: str, device: str, name: str) -> None:
    ranks = read_command(name).ranks
    if "get_default_backend_for_device" not in Path(name).read_text():
        pytest.skip("names its backend, or has no other rank")
    if device == "cuda":
        if this_machine().gpus < ranks:
            pytest.skip(f"its {ranks} ranks take gloo: {ranks} GPUs are not there")
        return
    if backend != "gloo" and name in ABOUT_GLOO:
        pytest.skip(ABOUT_GLOO[name])
    if device != "cpu" and name in ON_CPUS:
        pytest.skip(ON_CPUS[name])


WHERE_IT_RUNS = """\
if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)"""
NAMES_ITS_BACKEND = re.compile(
    r'^ *# .*\n *dist\.init_process_group\("gloo"\)$'
    r'|init_process_group\("(nccl|xtrain-)',
    re.MULTILINE,
)


def chooses_where_it_runs(text: str) -> bool:
    """By the lines that all share, or by a backend it names, gloo with the reason."""
    start = re.search(r"^( *)if torch\.accelerator", text, re.MULTILINE)
    lines = textwrap.indent(WHERE_IT_RUNS, start[1]) if start else None
    return lines in text if lines else bool(NAMES_ITS_BACKEND.search(text))


@pytest.mark.parametrize("name", [n for n in NAMES if read_command(ROOT / n).ranks])
def test_ranks_take_the_gpus_where_there_are_enough(name):
    assert chooses_where_it_runs(Path(name).read_text())


def test_another_way_to_choose_would_be_seen():
    other = WHERE_IT_RUNS.replace("LOCAL_RANK", "RANK")
    assert chooses_where_it_runs(WHERE_IT_RUNS) and not chooses_where_it_runs(other)
    gloo = 'dist.init_process_group("gloo")'
    assert chooses_where_it_runs(f"# a reason\n{gloo}")
    assert not chooses_where_it_runs(gloo)


def imports_of(path: str) -> dict[str, set[str]]:
    """The names a file imports, by top-level package."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name.split(".")[0], set()).add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.setdefault(node.module.split(".")[0], set()).update(names)
    return found


SCENE = {
    "xtrain.comm.CommLedger",
    "xtrain.comm.init_mesh",
    "xtrain.model.XtrainConfig",
    "xtrain.model.XtrainModel",
    "xtrain.testing.RankTimeout",
}
"""What a snippet may need besides: the model, its mesh, who counts, the harness's error
of a broken twin."""


PROGRAMS = "snippets/lc8/all_together.py", "snippets/lc8/deep_mlp.py"
"""Whole training programs: one for any layout, one with three ways to cut a network."""


@pytest.mark.parametrize("name", NAMES)
def test_a_snippet_fits_on_a_page_names_its_command_and_needs_few_names(name):
    """Two of ours at most; four from lecture 4 on, which puts things together.

    What a virtual cluster is made of is not counted: it is where a program runs. The
    `PROGRAMS` are no pieces of one.
    """
    text = Path(name).read_text()
    lines = text.splitlines()
    # Six choose where it runs, the same ones in each: a reader learns them once.
    most = 80 if name in PROGRAMS else 60
    assert len(lines) <= most + 6 * ("get_default_backend_for_device" in text)
    assert max(map(len, lines)) <= 88
    mark, program, *options = lines[0].partition(" --mesh")[0].split()
    assert (mark, options[-1]) == ("#", name)
    assert len(options) == {"torchrun": 3, "python": 1}[program]
    imports = imports_of(name)
    ours = imports.pop("xtrain", set())
    for theirs in ("torch", "safetensors"):
        imports.pop(theirs, None)
    assert imports.keys() <= sys.stdlib_module_names
    composes = re.search(r"/(lc[4-9]|cluster)/|/lc3/muon", name)
    most = 7 if name in PROGRAMS else 4 if composes else 2
    used = {name for name in ours - SCENE if not name.startswith("xtrain.cluster.")}
    assert len(used) <= most


def test_no_transcript_without_its_program():
    transcripts = {
        path.with_suffix(".py") for path in (ROOT / "snippets").rglob("*.out")
    }
    assert transcripts == set(SNIPPETS)


def names_of_the_standard_library(folder: Path) -> list[str]:
    """Files that would hide a module of the standard library from their neighbours."""
    return [p.name for p in folder.glob("*.py") if p.stem in sys.stdlib_module_names]


def test_no_snippet_hides_a_module_of_the_standard_library(tmp_path):
    for folder in {path.parent for path in SNIPPETS}:
        assert names_of_the_standard_library(folder) == []
    (tmp_path / "profile.py").touch()
    (tmp_path / "profile_collectives.py").touch()
    assert names_of_the_standard_library(tmp_path) == ["profile.py"]
