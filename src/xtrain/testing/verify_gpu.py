"""All lectures and the support matrix under NCCL, and a record of it to send.

    make verify-gpu                            with any number of GPUs, one included
    python -m xtrain.testing.verify_gpu -k ring      further words go to pytest
    python -m xtrain.testing.verify_gpu --backend gloo --minutes 5       without a GPU

Worlds with more ranks than GPUs share them where NCCL allows it (2.30) and their memory
is enough; elsewhere they are skipped with that reason. A run ends after 20 minutes, and
the next goes on from there, as it does after Ctrl-C: what is in build/verify-gpu and
passed on the same code is not run again.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from xtrain.evidence import results
from xtrain.evidence.forecast import expected
from xtrain.evidence.store import Store
from xtrain.testing.about import about
from xtrain.testing.backend_choice import (
    BACKENDS,
    Choice,
    Machine,
    choose,
    rank_environment,
    this_machine,
)
from xtrain.testing.gpu_fit import Fit, fit, free_memory, how_to_share
from xtrain.testing.long_run import LongRun

# The folders whose tests take their ranks from the session's backend.
FOLDERS = (
    "comm", "data_parallel", "zero", "tensor_parallel", "pipeline_parallel",
    "context_parallel", "expert_parallel", "model", "checkpoint", "whiteboard",
    "train", "matrix", "testing", "evidence",
)  # fmt: skip
HERE = "verify-gpu"  # below build/
RECORDS = Path("docs/data", results.FOLDER)
MINUTES = 20.0


def main(arguments: list[str]) -> int:
    """Run and keep; 0 if nothing failed, 1 if a test did, 2 where none can run."""
    parser = argparse.ArgumentParser(prog="verify_gpu", allow_abbrev=False)
    parser.add_argument("--backend", choices=BACKENDS, default="nccl")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--to", type=Path, help="folder of the record to send")
    options, words = parser.parse_known_args(arguments)
    machine = this_machine()
    try:
        choice = choose(options.backend, None, machine)
        on_cpus = Fit(max(1, (os.cpu_count() or 1) // 2), 0)
        fits = on_cpus if choice.device == "cpu" else fit(machine, free_memory())
    except ValueError as problem:
        print(f"{problem}\nxtrain doctor says what this machine has")
        return 2
    if choice.backend == "nccl" and (line := how_to_share(machine, torch.version.cuda)):
        print(line)
    store = Store(Path("build", HERE, f"{choice.backend}-{choice.device}.json"), Path())
    drop_other_machines(store, about(choice, machine))
    run = LongRun(
        store,
        expected(Store(RECORDS / "gloo-cpu.json", Path()).read()),
        lambda ranks: times_longer(ranks, choice, machine),
        fits.workers,
        60 * options.minutes,
    )
    code = pytest.main(command(choice, fits, words), plugins=[run])
    to = options.to or (RECORDS if choice.device == "cuda" else None)
    print(*report(run, options.minutes), sep="\n")
    print(keep(store, to) if to else "")
    return ending(code, run)


def command(choice: Choice, fits: Fit, words: list[str]) -> list[str]:
    """For pytest. Test processes get one test at a time, so that they can end soon."""
    folders = [str(path) for name in FOLDERS if (path := Path("tests", name)).is_dir()]
    options = ["-q", "-rs", "--tb=short", "-p", "xtrain.testing.long_run_worker"]
    options += ["-n", str(fits.workers), "--maxschedchunk", "1"]
    options += ["--backend", choice.backend, "--record-all", HERE]
    if fits.ranks_per_gpu:
        options += ["--ranks-per-gpu", str(fits.ranks_per_gpu)]
    return [*options, *folders, *words]


def times_longer(ranks: int, choice: Choice, machine: Machine) -> float:
    """Than on CPUs: ranks take turns on a GPU. 0 where the world does not fit."""
    try:
        rank_environment(ranks, choice, machine)
    except ValueError:
        return 0.0
    return max(1.0, ranks / machine.gpus) if choice.device == "cuda" else 1.0


def drop_other_machines(store: Store, now: dict[str, object]) -> None:
    """Forget results that are of other GPUs, or of another NCCL."""
    before = store.about()
    facts = ("platform", "torch", "gpus", "gpu", "nccl")
    if any(before.get(fact) != now.get(fact) for fact in facts):
        store.path.unlink(missing_ok=True)


def report(run: LongRun, minutes: float) -> list[str]:
    """What passed, failed, was skipped, and was not run."""
    found = Counter(run.ended.values())
    counts = ", ".join(f"{found[o]:,} {o}" for o in ("passed", "failed", "skipped"))
    lines = ["", f"{counts}; {len(run.done):,} had passed before on this code."]
    failed = sorted(name for name, ended in run.ended.items() if ended == "failed")
    lines += [f"  FAILED {name}" for name in failed]
    missing = run.asked - run.ended.keys()
    if missing:
        why = f"the {minutes:g} min are over" if run.over else "interrupted"
        lines.append(f"{len(missing):,} were not run: {why}. The same command goes on.")
    return lines


def keep(store: Store, folder: Path) -> str:
    """Copy what passed to where the pages look; how to send it."""
    good = store.good()
    passed, facts = results.passes(good), store.about()
    if not passed:
        return "Nothing has passed on ranks, so there is no record to send."
    sizes = results.world_sizes(passed)
    failed = [name for name, e in good.items() if e.value["outcome"] == "failed"]
    gpus = facts.get("gpus", 0)
    facts |= {
        "world_sizes": sizes,
        "shared": [size for size in sizes if gpus and size > gpus],
        "failed": sorted(failed),
    }
    kind = f"{gpus} {facts.get('gpu', 'cpu')}" if gpus else "cpu"
    name = "-".join([facts["backend"], *kind.lower().split()])
    target = Store(folder / f"{name}.json", store.root)
    target.write(passed, facts)
    symbols = {s for entry in passed.values() for s in entry.value["ran"]}
    return (
        f"{len(symbols)} functions and classes ran on {facts['backend']} in worlds of "
        f"{', '.join(map(str, sizes))}. The record is {target.path}: it has "
        "what passed, and names what failed. The pages of your checkout show it from "
        "now on. To send it: commit that one file and open a pull request."
    )


def ending(code: int, run: LongRun) -> int:
    """The exit status: a run that was cut in time is as good as its tests."""
    if "failed" in run.ended.values():
        return 1
    in_time = code == pytest.ExitCode.INTERRUPTED and run.over
    nothing_left = code == pytest.ExitCode.NO_TESTS_COLLECTED and run.done
    return 0 if in_time or nothing_left else int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
