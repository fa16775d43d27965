"""A disk that is full: for a checkpoint, for the log, for the flight recorder's files.

The kernel refuses each time: by a limit on the size of files, or at /dev/full.
"""

import dataclasses
import io
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from torch.profiler import profile

from tests.faults import trained
from tests.faults.cases import CASES, DISK
from tests.faults.runner import run_ranks
from tests.faults.test_processes import (
    LAYOUTS,
    STEP,
    STEPS,
    disturbed,
    goes_on,
    recipe,
    undisturbed,
)
from tests.faults.trained import select
from tests.train.test_run import close
from xtrain.plan import Layout
from xtrain.train import profiling
from xtrain.train.overrides import overridden
from xtrain.train.recipe_parts import Checkpoint, Log
from xtrain.train.run import train

pytestmark = pytest.mark.processes("faults are of processes")
__all__ = ["undisturbed"]
FULL = "/dev/full"
FOLDER = "log.profile_folder"
NOT, NO_ROOM = "was not written: OSError: ", r"\[Errno 28\] No space left on device"


@pytest.mark.parametrize("case", select(c for c in CASES if c.fault == DISK))
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(
    case, tmp_path, undisturbed
):
    ends, victim = disturbed(case, tmp_path)
    for rank, end in enumerate(ends):
        assert end.code == 1
        assert f"step {STEP} was not saved" in end.error
        assert f"rank {victim}: " in end.error
        assert "File too large" in end.error
        assert f"\nrank {rank}, step {STEP}, checkpoint\n" in end.error
    left = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert left == [f"step-{STEP - 1:08d}"]
    goes_on(case, tmp_path, STEP - 1, undisturbed(case.axis))


def error_of(made, where):
    """What this rank raises, when its standard output has no room, or its folder of
    traces is a file by then."""
    with pytest.MonkeyPatch.context() as patch:
        if where == "profile" and dist.get_rank() == 1:
            own = Path(made.log.profile_folder, "own")
            log = Log(profile="2:2", profile_folder=str(own))
            made = dataclasses.replace(made, log=log)

            def replaced(**options):
                own.rmdir()
                own.touch()
                return profile(**options)

            patch.setattr(profiling, "profile", replaced)
        if where == "standard output":
            full = io.FileIO(FULL, "w")  # without a buffer that is written at its end
            patch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(OSError, match="rank ") as caught:
            train(made)
    return [str(caught.value), *caught.value.__notes__]


@pytest.mark.verifies("xtrain.train.metrics:Writers", "xtrain.train.stopping:Stopping")
@pytest.mark.skipif(not os.path.exists(FULL), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("where", "steps", "size", "place", "words"),
    [
        ("log.jsonl", 4, 2, "step 1, log", f"rank 0: log.jsonl={FULL} {NOT}{NO_ROOM}"),
        ("log.jsonl", 1, 3, "step 1, finish", "rank 0: "),
        ("standard output", 4, 3, "step 1, log", f"rank 0: standard output {NOT}"),
        ("profile", 4, 2, "step 2, log", rf"rank 1: {FOLDER}=\S+own was not w"),
    ],
)
def test_what_one_rank_cannot_write_ends_all_with_one_error(
    world, tmp_path, where, steps, size, place, words
):
    log = Log(jsonl=FULL if where == "log.jsonl" else None, profile="2:2",
              profile_folder=str(tmp_path))  # fmt: skip
    layout = Layout(data=size, micro_batches=2)
    made = trained.recipe(tmp_path, layout, log=log, steps=steps, global_batch=2 * size)
    for rank, (text, note) in enumerate(world(size).run(error_of, made, where)):
        assert re.match(words, text), text
        assert note == f"rank {rank}, {place}"


def refused(made, option, path, owner):
    """What this rank raises, when one rank has a path that cannot be written."""
    if dist.get_rank() == owner:
        made = overridden(made, [f"--{option}={path}"])
    with pytest.MonkeyPatch.context() as patch:
        package = ModuleType("torch.utils.tensorboard")
        vars(package).update(SummaryWriter=os.makedirs)
        patch.setitem(sys.modules, package.__name__, package)
        with pytest.raises(OSError, match="rank ") as caught:
            train(made)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "path", "why", "owner"),
    [
        ("log.jsonl", "none/log", "No such file or directory", 0),
        ("log.jsonl", "", "Is a directory", 0),
        ("log.tensorboard", "file/runs", "Not a directory", 0),
        (FOLDER, "file", "File exists", 1),
        ("log.flight_recorder", "file/calls", "Not a directory", 1),
    ],
)
def test_a_path_that_cannot_be_opened_is_named_on_every_rank(
    world, tmp_path, option, path, why, owner
):
    (tmp_path / "file").touch()
    path, calls = tmp_path / path, tmp_path / "calls"
    log = Log(profile="1:1", profile_folder=str(calls), flight_recorder=str(calls))
    made = trained.recipe(tmp_path, Layout(data=3), log=log)
    told = f"rank {owner}: {option}={path} cannot be written: {why}"
    assert world(3).run(refused, made, option, path, owner) == [told] * 3


def test_a_flight_recorder_without_room_disturbs_no_step(tmp_path, undisturbed):
    """It writes at the end of the run, by when the disk of rank 1 is full."""
    made = recipe("tensor", tmp_path, LAYOUTS["tensor"])
    made = dataclasses.replace(made, checkpoint=Checkpoint())
    for end in run_ranks(made, 2, (1, "disk full", "optimizer", STEPS), tmp_path):
        assert close(end.losses, undisturbed("tensor")), end
    assert "flight recorder: [Errno 27] File too large" in end.output
    assert [path.name for path in (tmp_path / "calls").glob("*.json")] == [
        "rank-0.json"
    ]
