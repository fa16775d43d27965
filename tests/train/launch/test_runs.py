"""The files start real runs: a rank is killed, and the run ends as if it had not been.

one torchrun of two ranks                      quick
the same, under the batch script for Slurm     slow
two torchruns, on this machine or in two       slow
network namespaces, where these are allowed
two torchruns, one lost for good, one back     slow
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.backends.test_two_hosts import ADDRESSES, hosts
from tests.comm.reference import free_port
from tests.train.launch.scripts import fakes
from xtrain.train.launch import ENGINES, Job
from xtrain.train.loading import load_recipe
from xtrain.train.overrides import overridden
from xtrain.train.run import train

RECIPE = str(Path(__file__).with_name("killed.py"))
BIN = str(Path(sys.executable).parent)  # where torchrun is
namespaces = hosts  # a fixture


class Launched:
    """Two ranks on so many nodes, of which rank 1 is killed once."""

    def __init__(
        self, folder: Path, engine: str, nodes: int, steps: int = 4, **job_options: Any
    ):
        self.program = sys.executable if engine == "ray" else "bash"
        self.steps, self.saved = steps, folder / "run" / "recipe.json"
        self.log, self.killed = folder / "log.jsonl", folder / "killed"
        self.script, text = folder / "job.sh", folder / "text.txt"
        text.write_text("one two three four five six seven eight nine ten\n" * 40)
        self.data = f"--data.path={text}"
        job = Job(
            name="run", recipe=RECIPE, nodes=nodes, gpus_per_node=2 // nodes,
            options=("--layout.data=2", "--checkpoint.every=2", self.data,
                     f"--steps={steps}",
                     f"--log.jsonl={self.log}"),
            folder=str(folder), port=free_port(), max_restarts=2,
            environment={"OMP_NUM_THREADS": "1"}, **job_options,
        )  # fmt: skip
        self.script.write_text(ENGINES[engine](job))

    @contextmanager
    def start(
        self, *words: str, before: Sequence[str] = (), **variables: str
    ) -> Iterator[subprocess.Popen]:
        """The script, or Ray's program; it is ended with all that it has started."""
        path = variables.get("PATH", os.environ["PATH"])
        own = {"XTRAIN_KILLED": str(self.killed)} | variables
        process = subprocess.Popen(
            [*before, self.program, str(self.script), *words],
            env={**os.environ, **own, "PATH": f"{BIN}:{path}"},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)

    def check(self) -> None:
        """All losses are those of a run on one process."""
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        assert [line["step"] for line in found] == [*range(1, self.steps + 1)]
        words = [self.data, f"--steps={self.steps}"]
        expected = train(overridden(load_recipe(RECIPE), words)).losses
        assert [line["loss"] for line in found] == pytest.approx(expected, rel=1e-9)


@pytest.mark.verifies("xtrain.train.launch.torchrun:torchrun")
def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path):
    run = Launched(tmp_path, "torchrun", nodes=1)
    with run.start("0", "127.0.0.1") as process:
        assert process.wait(240) == 0
    assert run.killed.exists()
    run.check()


@pytest.mark.slow
@pytest.mark.verifies("xtrain.train.launch.slurm:slurm")
def test_the_script_for_slurm_runs_a_real_torchrun(tmp_path):
    """srun and scontrol are ours."""
    run, commands = Launched(tmp_path, "slurm", nodes=1), tmp_path / "commands"
    commands.mkdir()
    variables = fakes(commands) | {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "x"}
    (commands / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
    with run.start(**variables) as process:
        assert process.wait(240) == 0
    assert run.killed.exists()
    run.check()


def two_nodes(run: Launched, host: str, places: list[dict]) -> None:
    with ExitStack() as undo:
        nodes = [
            undo.enter_context(run.start(str(number), host, **place))
            for number, place in enumerate(places)
        ]
        assert [node.wait(240) for node in nodes] == [0, 0]
    assert run.killed.exists()
    run.check()


def until(true: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.verifies("xtrain.train.launch.torchrun:torchrun")
def test_two_torchruns_start_again_together(tmp_path):
    two_nodes(Launched(tmp_path, "torchrun", nodes=2), "127.0.0.1", [{}, {}])


@pytest.mark.slow
@pytest.mark.verifies("xtrain.train.launch.torchrun:torchrun")
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_two_torchruns_in_network_namespaces_start_again_together(tmp_path, namespaces):
    places = [
        {
            "before": ["ip", "netns", "exec", name],
            "PET_LOCAL_ADDR": address,
            "GLOO_SOCKET_IFNAME": "cable",
        }
        for name, address in zip(namespaces, ADDRESSES, strict=True)
    ]
    run = Launched(tmp_path, "torchrun", nodes=2)
    two_nodes(run, ADDRESSES[0], places)


@pytest.mark.slow
@pytest.mark.verifies(
    "xtrain.train.launch.torchrun:torchrun", "xtrain.train.elastic:fitted"
)
def test_the_run_goes_on_without_a_lost_node_and_with_it_when_it_is_back(tmp_path):
    """The curve is that of one process, with two nodes, one, and two again."""
    run = Launched(tmp_path, "torchrun", nodes=2, steps=60, min_nodes=1)
    here, own = "127.0.0.1", {"XTRAIN_KILLED": "/", "XTRAIN_PACE": "0.5"}

    def ranks() -> int:
        """Of the start that runs now, as it has written its recipe."""
        try:
            data: int = json.loads(run.saved.read_text())["recipe"]["layout"]["data"]
        except (FileNotFoundError, json.JSONDecodeError):
            return 0
        return data

    with run.start("0", here, **own) as first:
        with run.start("1", here, **own) as second:
            until((tmp_path / "run" / "latest").exists)
            assert ranks() == 2
            lost = [second.pid, *descendants(second.pid)]
            for process in lost:
                os.kill(process, signal.SIGKILL)
        until(lambda: ranks() == 1)
        with run.start("1", here, **own) as second:
            until(lambda: ranks() == 2)
            assert [node.wait(240) for node in (first, second)] == [0, 0]
    run.check()


def descendants(parent: int) -> list[int]:
    """torchrun's ranks have sessions of their own: their parents tell them."""
    words = ["ps", "-o", "pid=", "--ppid", str(parent)]
    found = subprocess.run(words, capture_output=True, text=True).stdout.split()
    return [one for pid in map(int, found) for one in (pid, *descendants(pid))]
