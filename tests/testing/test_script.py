"""run_script: what torchrun does, in a tenth of the time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from xtrain.testing import RankDied, RankTimeout, run_script
from xtrain.testing.script import read_command

RING = """\
# torchrun --nproc-per-node {ranks} {path}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.tensor([float(rank)])
dist.all_reduce(x)
print(f"rank {{rank}} of {{size}}: {{x.item()}}")
if rank == 0:
    print("only here")
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    """Write a script; `{path}` in its text becomes its path."""

    def write(text: str, **values: object) -> Path:
        path = tmp_path / "snippet.py"
        path.write_text(text.format(path=path, **values))
        return path

    return write


def test_one_stdout_per_rank_in_rank_order(script):
    outputs = run_script(script(RING, ranks=3))
    assert outputs == [
        "rank 0 of 3: 3.0\nonly here\n",
        "rank 1 of 3: 3.0\n",
        "rank 2 of 3: 3.0\n",
    ]


ASKS = """\
# torchrun --nproc-per-node 2 {path}
import torch, torch.distributed as dist
if torch.accelerator.device_count() > 1:
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
dist.all_reduce(x := torch.ones(1))
print(dist.get_backend(), x.device.type, x.item())
dist.destroy_process_group()
"""


def test_a_script_that_asks_gets_the_backend_given(script):
    asks = script(ASKS)
    assert run_script(asks) == ["gloo cpu 2.0\n"] * 2
    assert run_script(asks, backend="xtrain-shm") == ["xtrain-shm cpu 2.0\n"] * 2
    assert dist.get_default_backend_for_device("cpu") == "gloo"  # here, as it was


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which(os.environ.get("CXX", "g++")),
    reason="the pretended device needs Linux and g++",
)
def test_a_script_finds_the_pretended_device(script):
    found = run_script(script(ASKS), backend="nccl-rules", device="xgpu")
    assert found == ["nccl-rules xgpu 2.0\n"] * 2


def test_torchrun_prints_the_same(script, tmp_path):
    path = script(RING, ranks=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    logs = ["--redirects", "1", "--log-dir", str(tmp_path / "logs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*torchrun, "--standalone", *logs, path], env=environment, check=True
    )
    written = sorted((tmp_path / "logs").rglob("stdout.log"))
    assert [file.read_text() for file in written] == run_script(path)


def test_output_from_c_and_from_subprocesses_is_kept(script):
    path = script(
        "# python {path} one two=3\n"
        "import ctypes, os, sys\n"
        "print('from Python', __name__, sys.argv[1:])\n"
        "sys.stdout.flush()\n"
        "ctypes.CDLL(None).puts(b'from C')\n"
        "ctypes.CDLL(None).fflush(None)\n"
        "os.system('echo from a child')\n"
        "ctypes.CDLL(None).puts(b'from C, not flushed')\n"
    )
    expected = [
        "from Python __main__ ['one', 'two=3']",
        "from C",
        "from a child",
        "from C, not flushed",
    ]
    assert run_script(path)[0].splitlines() == expected


def test_the_environment_is_torchruns(script):
    path = script(
        "# torchrun --nproc_per_node=2 {path}\n"
        "import os\n"
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR'\n"
        "print([os.environ[name] for name in names.split()])\n"
    )
    assert run_script(path) == [
        "['0', '2', '0', '2', '127.0.0.1']\n",
        "['1', '2', '1', '2', '127.0.0.1']\n",
    ]
    assert "MASTER_PORT" not in os.environ


def test_a_python_script_may_start_a_world(script):
    path = script(
        "# python {path}\n"
        "import torch.distributed as dist\n"
        "from xtrain.testing import World\n"
        "def rank():\n"
        "    return dist.get_rank()\n"
        "print(World(3).run(rank))\n"
    )
    assert run_script(path) == ["[0, 1, 2]\n"]


def test_seeds_are_not_inherited(script):
    path = script("# python {path}\nimport torch\nprint(torch.rand(2).tolist())\n")
    assert run_script(path) != run_script(path)


def test_functions_registered_at_exit_run_and_ours_do_not(script, tmp_path):
    import atexit

    mark = tmp_path / "ours"
    atexit.register(mark.touch)
    path = script("# python {path}\nimport atexit\natexit.register(print, 'goodbye')\n")
    try:
        assert run_script(path) == ["goodbye\n"]
        assert not mark.exists()
    finally:
        atexit.unregister(mark.touch)


def test_an_exception_shows_the_traceback_of_its_rank(script):
    path = script(
        "# torchrun --nproc-per-node 2 {path}\n"
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise KeyError('lost')\n"
        "dist.barrier()\n"
    )
    with pytest.raises(KeyError, match="rank 1: KeyError: 'lost'") as caught:
        run_script(path)
    assert f'"{path}", line 5' in str(caught.value)
    assert caught.value.first.rank == 1  # rank 0 only lost its connection


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("sys.exit(3)", "SystemExit: 3"),
        ("os._exit(4)", "exited with code 4"),
        ("os.abort()", "died by SIGABRT"),
    ],
)
def test_a_bad_end_is_an_error(script, ending, error):
    path = script("# python {path}\nimport os, sys\n" + ending + "\n")
    with pytest.raises(Exception, match=error) as caught:
        run_script(path)
    assert isinstance(caught.value, RankDied) != ("sys" in ending)


def test_a_good_exit_is_none(script):
    path = script("# python {path}\nimport sys\nprint('done')\nsys.exit(0)\n")
    assert run_script(path) == ["done\n"]


def test_a_script_that_hangs_is_cut(script):
    path = script(
        "# torchrun --nproc-per-node 2 {path}\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.recv(torch.zeros(1), src=1 - dist.get_rank())\n"
    )
    with pytest.raises(RankTimeout, match=r"rank 0: waiting in recv\(.*src=1\)"):
        run_script(path, timeout=2.0)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("# torchrun --nproc-per-node 4 a.py", (4, ())),
        ("# torchrun --nproc_per_node=2 a.py --steps 3", (2, ("--steps", "3"))),
        ("# python a.py x", (None, ("x",))),
        ("# torchrun a.py", None),
        ("# torchrun --nproc-per-node 0 a.py", None),
        ("# torchrun --nproc-per-node 2", None),
        ("import torch", None),
        ("", None),
    ],
)
def test_the_first_line_is_the_command(tmp_path, line, command):
    path = tmp_path / "a.py"
    path.write_text(line + "\n")
    if command is None:
        with pytest.raises(ValueError, match="the first line must be"):
            read_command(path)
    else:
        found = read_command(path)
        assert (found.ranks, found.arguments) == command
