"""A Slurm of one machine runs the batch script, where Debian's slurm-wlm is installed.

Its daemons listen on 127.0.0.1 and keep their files in a folder of the test.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.comm.reference import free_port
from tests.train.launch.test_runs import BIN, Launched, until

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge
SlurmUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""
Command = Callable[..., str]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Command]:
    """Calls a command of Slurm; its output."""
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd"))) or os.getuid():
        pytest.skip("needs munge and slurm-wlm, and root")
    host, folder = socket.gethostname().partition(".")[0], tmp_path / "slurm"
    folder.mkdir()
    (folder / "slurm.conf").write_text(
        CONF.format(
            host=host, folder=folder, controller=free_port(), daemon=free_port()
        )
    )
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    names = ("socket=munge", "key-file=key", "log-file=munge.log",
             "pid-file=munge.pid", "seed-file=munge.seed")  # fmt: skip
    own = [f"--{name.replace('=', f'={folder}/')}" for name in names]
    path = {"SLURM_CONF": str(folder / "slurm.conf")}
    variables = {**os.environ, **path, "PATH": f"{BIN}:{os.environ['PATH']}"}
    started = []
    try:
        for words in (["munged", "-F", "--force", *own], ["slurmctld"], ["slurmd"]):
            words = words if len(words) > 1 else [*words, "-D"]
            with open(folder / f"{words[0]}.out", "w") as out:
                started.append(
                    subprocess.Popen(words, env=variables, stdout=out, stderr=out)
                )
            time.sleep(1)
        yield lambda *words, **more: subprocess.run(
            words, env=variables | more, capture_output=True, text=True, check=True,
            timeout=60,
        ).stdout  # fmt: skip
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(60)


@pytest.mark.slow
@pytest.mark.verifies("xtrain.train.launch.slurm:slurm")
def test_slurm_runs_the_job_to_its_end_though_a_rank_is_killed(slurm, tmp_path):
    run = Launched(tmp_path, "slurm", nodes=1)
    slurm("sbatch", f"--chdir={tmp_path}", run.script, XTRAIN_KILLED=str(run.killed))
    until(lambda: slurm("squeue", "-h") == "")
    assert run.killed.exists()
    run.check()


@pytest.mark.slow
@pytest.mark.verifies("xtrain.train.launch.slurm:slurm")
def test_a_job_that_runs_out_of_time_is_queued_again(slurm, tmp_path):
    """The batch shell gets the signal that Slurm sends before the end."""
    run = Launched(tmp_path, "slurm", nodes=1, steps=10**6)
    told = slurm("sbatch", "--parsable", f"--chdir={tmp_path}", run.script)
    number = told.strip()
    until(lambda: (tmp_path / "run" / "latest").exists())
    slurm("scancel", "--signal=USR1", "--batch", number)
    until(lambda: "PENDING" in slurm("squeue", "-h", "-o", "%T"))
    assert "Restarts=1" in slurm("scontrol", "show", "job", number)
    slurm("scancel", number)
