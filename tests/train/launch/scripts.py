"""Jobs, and commands in the place of torchrun, srun and scontrol."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from xtrain.train.launch import ENGINES, Job

NASTY = 'it\'s $(HOME) $$b $HOME `c` "d" \\ # é $(NCCL_DEBUG) $$(A) * a: b  '
"""What a shell, YAML and Kubernetes would each read in another way."""
FAKES = {
    "torchrun": """
import json, os, sys
node = os.environ.get("SLURM_NODEID", os.environ.get("NODE", "0"))
with open(os.path.join(os.environ["FAKES"], f"node-{node}.json"), "x") as file:
    json.dump({"words": sys.argv[1:], "variables": dict(os.environ)}, file)
""",
    "scontrol": """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("first.of." + sys.argv[3], "second", sep="\\n", flush=True)
else:
    with open(os.path.join(os.environ["FAKES"], "asked"), "a") as file:
        print(*sys.argv[1:], file=file)
""",
    "scancel": """
import os, signal, sys
assert sys.argv[1:] == ["--signal=TERM", "77"]
with open(os.path.join(os.environ["FAKES"], "pid")) as file:
    os.kill(int(file.read()), signal.SIGTERM)
""",
    "srun": """
import os, subprocess, sys
assert {"--kill-on-bad-exit=1", "--cpu-bind=none"} == set(sys.argv[1:3])
for node in range(int(os.environ["SLURM_NNODES"])):
    variables = {**os.environ, "SLURM_NODEID": str(node)}
    subprocess.run(sys.argv[3:], env=variables, check=True)
""",
}


def job_of(**changes: Any) -> Job:
    """Of two nodes of two ranks."""
    values: dict[str, Any] = {
        "name": "run-1", "recipe": "bytes", "nodes": 2, "gpus_per_node": 2,
        "options": ("--layout.data=4",),
    }  # fmt: skip
    return Job(**(values | changes))


def fakes(folder: Path, **programs: str) -> dict[str, str]:
    """Write the commands; the variables with which a shell finds them."""
    for name, program in (FAKES | programs).items():
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{program}")
        path.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FAKES": str(folder),
        "SLURM_JOB_NODELIST": "list",
        "SLURM_JOB_ID": "77",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
    }


def pods(text: str) -> Mapping[str, Any]:
    """The Job of a JobSet, or of the template of a TrainingRuntime."""
    spec = next(yaml.safe_load_all(text))["spec"]
    spec = spec.get("template", {}).get("spec", spec)
    found: Mapping[str, Any] = spec["replicatedJobs"][0]["template"]["spec"]
    return found


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """As a kubelet does it: $$ is a dollar, $(NAME) a variable if there is one."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]),
        word,
    )


def container(text: str) -> tuple[list[str], dict[str, str]]:
    """The command of a pod as it is run, and its environment."""
    (one,) = pods(text)["template"]["spec"]["containers"]
    given: dict[str, str] = {}
    for variable in one["env"]:
        given[variable["name"]] = expanded(variable["value"], given)
    return [expanded(w, given) for w in [*one["command"], *one["args"]]], given


def run_script(engine: str, job: Job, folder: Path) -> list[dict[str, Any]]:
    """Run the file on every node with the fakes; what each torchrun was given."""
    text, variables = ENGINES[engine](job), fakes(folder)
    script = folder / "job"
    script.write_text(text)
    for node in range(1 if engine == "slurm" else job.nodes):
        words, place = ["bash", str(script)], {"NODE": str(node)}
        if engine == "torchrun":
            words += [str(node), "first"]
        elif engine != "slurm":
            words, given = container(text)
            place |= given | {"JOB_COMPLETION_INDEX": str(node)}
        subprocess.run(words, env=variables | place, check=True, timeout=60)
    return [
        json.loads((folder / f"node-{node}.json").read_text())
        for node in range(job.nodes)
    ]
