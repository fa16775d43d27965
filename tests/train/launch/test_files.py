"""Each engine's file: of its schema, and executed with what it starts recorded."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from torch.distributed.run import config_from_args, parse_args

from tests.train.launch import schemas
from tests.train.launch.scripts import NASTY, fakes, job_of, pods, run_script
from xtrain import cli
from xtrain.train.launch import ENGINES, jobset, kubeflow, ray, slurm

SYMBOLS = [f"xtrain.train.launch.{name}:{name}" for name in ENGINES]
SHELLS = [name for name in ENGINES if name != "ray"]


@pytest.mark.verifies(
    *SYMBOLS[:4],
    "xtrain.train.launch.shell:arguments",
    "xtrain.train.launch.kubernetes:literal",
)
@pytest.mark.parametrize("least", [None, 1])
@pytest.mark.parametrize("engine", SHELLS)
def test_every_node_runs_torchrun_with_these_words(engine, least, tmp_path):
    options = ("--layout.data=4", f"--sample.prompt={NASTY}")
    given = {"environment": {"A": NASTY}, "max_restarts": 5, "min_nodes": least}
    job = job_of(options=options, **given)
    fewest = 1 if least and engine != "slurm" else 2
    for node, found in enumerate(run_script(engine, job, tmp_path)):
        config, command, words = config_from_args(parse_args(found["words"]))
        assert Path(command).name.startswith("python")
        assert words[words.index("-m") :] == ["-m", "xtrain", "train", *job.train]
        assert f"--sample.prompt={NASTY}" in words
        assert found["variables"]["A"] == NASTY
        assert found["variables"]["NCCL_DEBUG"] == "WARN"
        nodes = config.min_nodes, config.max_nodes
        assert nodes == (fewest, 2) and config.nproc_per_node == 2
        assert config.max_restarts == 5 and config.rdzv_backend == "c10d"
        host = {"torchrun": "first", "slurm": "first.of.list"}
        assert config.rdzv_endpoint == (
            host.get(engine, "run-1-node-0-0.run-1") + ":29400"
        )
        assert config.run_id == ("77" if engine == "slurm" else "run-1")
        assert config.rdzv_configs["is_host"] == str(int(node == 0))


@pytest.mark.verifies(SYMBOLS[3], "xtrain.train.launch.kubernetes:pod_spec")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_jobset_is_of_its_schema(device):
    text = jobset(job_of(options=("--layout.data=4", f"--device={device}")))
    (found,) = yaml.safe_load_all(text)
    schemas.check(found, schemas.JOB_SET)
    spec = pods(text)
    assert spec["completions"] == spec["parallelism"] == 2
    (one,) = spec["template"]["spec"]["containers"]
    limits = one.get("resources", {}).get("limits", {})
    assert limits == ({"nvidia.com/gpu": 2} if device == "auto" else {})
    mounts = {one["mountPath"] for one in one["volumeMounts"]}
    assert mounts == {"/shared", "/dev/shm"}


@pytest.mark.verifies(SYMBOLS[2])
def test_a_train_job_and_its_runtime_are_of_their_schemas():
    runtime, train = yaml.safe_load_all(kubeflow(job_of()))
    schemas.check(runtime, schemas.TRAINING_RUNTIME)
    schemas.check(train, schemas.TRAIN_JOB)
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 2}


def test_the_schemas_refuse_what_is_not_theirs():
    (found,) = yaml.safe_load_all(jobset(job_of()))
    for change in (
        {"kind": "Job"},
        {"spec": found["spec"] | {"replicas": 1}},
        {"metadata": {}},
    ):
        with pytest.raises(AssertionError):
            schemas.check(found | change, schemas.JOB_SET)


@pytest.mark.verifies(SYMBOLS[1])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_what_sbatch_reads(device):
    text = slurm(job_of(hours=1.51, options=("--layout.data=4", f"--device={device}")))
    found = [line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    for one in found:
        assert one.partition("=")[0] in schemas.SBATCH
    assert ("--gpus-per-node=2" in found) == (device == "auto")
    assert {"--nodes=2", "--ntasks-per-node=1", "--time=91", "--requeue"} < set(found)
    assert "\n#SBATCH --nodes=1-2\n" in slurm(job_of(min_nodes=1))


@pytest.mark.verifies(SYMBOLS[4])
def test_ray_may_start_any_number_of_ranks_from_the_fewest():
    assert "num_workers=(2, 4)" in ray(job_of(min_nodes=1))
    halves = ("--layout.data=2", "--layout.tensor=2")
    with pytest.raises(ValueError, match="3 ranks are no multiple of"):
        ray(job_of(min_nodes=1, options=halves))


WAITS = """
import os, signal, sys, time
with open(os.path.join(os.environ["FAKES"], "pid"), "w") as file:
    print(os.getpid(), file=file)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.verifies(SYMBOLS[1])
@pytest.mark.parametrize("late", [True, False])
def test_a_job_for_slurm_ends_in_order_and_only_a_late_one_comes_back(late, tmp_path):
    """Of a cancelled job Slurm signals shell and step, of a late one the shell."""
    script = tmp_path / "job"
    script.write_text(slurm(job_of()))
    process = subprocess.Popen(
        ["bash", script], env=fakes(tmp_path, srun=WAITS), stdout=subprocess.PIPE
    )
    assert process.stdout and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGUSR1 if late else signal.SIGTERM)
    if not late:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    assert process.wait(30) == 143
    asked = tmp_path / "asked"
    assert asked.exists() == late
    assert not late or asked.read_text() == "requeue 77\n"


@pytest.mark.verifies(SYMBOLS[4])
@pytest.mark.parametrize("code", [0, 1])
def test_the_program_for_ray_trains_with_these_words(code, monkeypatch, tmp_path):
    """Its calls, with classes of the names and arguments that Ray documents."""
    job = job_of(options=("--layout.data=4", f"--sample.prompt={NASTY}"))
    seen: dict[str, Any] = {}
    modules = {name: ModuleType(name) for name in ("ray", "ray.train")}
    modules["ray.train.torch"] = ModuleType("ray.train.torch")
    vars(modules["ray"]).update(init=lambda runtime_env: seen.update(runtime_env))
    for name, fields in schemas.RAY.items():
        vars(modules["ray.train"])[name] = lambda fields=fields, **given: (
            seen.update({field: given[field] for field in given if field in fields})
            if given.keys() <= fields
            else pytest.fail(f"{given} {fields}")
        )
    vars(modules["ray.train.torch"]).update(
        TorchTrainer=lambda function, scaling_config, run_config: SimpleNamespace(
            fit=function
        )
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    words: list[str] = []
    monkeypatch.setattr(cli, "main", lambda given: words.extend(given) or code)
    monkeypatch.setenv("LOCAL_RANK", "0")
    text = ray(job)
    assert ast.get_docstring(ast.parse(text))
    program = compile(text, "job.py", "exec")
    if code:
        with pytest.raises(RuntimeError, match="ended with exit code 1"):
            exec(program, {"__name__": "__main__"})
    else:
        exec(program, {"__name__": "__main__"})
    assert words == ["train", *job.train]
    assert (seen["num_workers"], seen["use_gpu"], seen["max_failures"]) == (4, True, 3)
    assert seen["env_vars"] == job.variables
