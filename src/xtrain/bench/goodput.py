"""Goodput of a run whose ranks are killed, beside `xtrain.plan.goodput`.

    python -m xtrain.bench.goodput -o docs/data/runs/goodput.json

    time      |step step save step ste|          start          |step step save ...
                                   kill     r seconds            redone

Two ranks under torchrun; one of them gets SIGKILL at times that are drawn, with
exponential gaps, also while ranks start. Checkpoints are as far apart as Daly's formula
has it for the step and the checkpoint of a run that is left alone, and four times as
far. Rank 0 notes when each step and each checkpoint begins and ends.

    measured   seconds of the steps that are kept / seconds of the whole run
    formula    of the measured step, checkpoint and restart: the mean over many runs
    simulated  what 9 of 10 runs of this length have, kills drawn as here

A short run has a share of its own, for it has few kills; the formula is right about it
if `measured` is in the range that is simulated.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from xtrain.bench.machine import describe, versions
from xtrain.plan import Layout, daly_interval, goodput
from xtrain.train.batches import Batch
from xtrain.train.processes import ranks
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Checkpoint, Log, SampleSpec
from xtrain.train.recipes import dense_bytes
from xtrain.train.run import TrainingRun
from xtrain.train.saved import from_json, to_json

RANKS = 2
Event = dict[str, Any]


class TimedRun(TrainingRun):
    """A run whose rank 0 notes its steps and checkpoints, a line of JSON each."""

    notes: Path

    @contextmanager
    def noted(self, kind: str, step: int) -> Iterator[None]:
        begin = time.monotonic()
        yield
        if self.is_first:
            event = {
                "kind": kind,
                "step": step,
                "begin": begin,
                "end": time.monotonic(),
            }
            with self.notes.open("a") as file:
                print(json.dumps(event), file=file)

    def train_step(self, batch: Batch) -> tuple[float, float]:
        with self.noted("step", self.step + 1):
            return super().train_step(batch)

    def save(self) -> None:
        with self.noted("save", self.step):
            super().save()


def train_noted(folder: Path) -> None:
    """What each rank does: the recipe of `folder`, notes beside it."""
    recipe = from_json((folder / "recipe.json").read_text(), Recipe)
    with ranks(recipe.device) as device:
        run = TimedRun(recipe, device)
        run.notes = folder / "notes.jsonl"
        try:
            run.go()
            run.finish()
        finally:
            run.close()


def run(
    folder: Path, steps: int, every: int, between: float, drawn: random.Random
) -> list[float]:
    """Train to the end, with a kill about every `between` seconds; when they were."""
    folder.mkdir()
    kept = Checkpoint(folder=str(folder / "checkpoints"), every=every, keep=2)
    recipe = replace(
        dense_bytes(), steps=steps, device="cpu", threads=1, checkpoint=kept,
        layout=Layout(data=RANKS), sample=SampleSpec(), log=Log(every=10**6),
    )  # fmt: skip
    (folder / "recipe.json").write_text(to_json(recipe))
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={RANKS}", "--max-restarts=1000", "-m", __spec__.name,
        "--rank", str(folder),
    ]  # fmt: skip
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "log").open("w") as log:
        torchrun = subprocess.Popen(
            words, env=os.environ | fresh, stdout=log, stderr=log
        )
        while not (folder / "notes.jsonl").exists() and torchrun.poll() is None:
            time.sleep(0.05)
        kills: list[float] = []
        while torchrun.poll() is None:
            try:
                torchrun.wait(drawn.expovariate(1 / between))
            except subprocess.TimeoutExpired:
                kills += kill_one(torchrun, drawn)
    if torchrun.returncode != 0:
        raise RuntimeError(f"torchrun: {torchrun.returncode}, see {folder / 'log'}")
    return kills


def kill_one(torchrun: subprocess.Popen[bytes], drawn: random.Random) -> list[float]:
    """SIGKILL for one of the ranks, as soon as there are some; when it was."""
    while torchrun.poll() is None:
        words = ["ps", "-o", "pid=", "--ppid", str(torchrun.pid)]
        found = subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout.split()
        if found:
            os.kill(int(drawn.choice(found)), signal.SIGKILL)
            return [time.monotonic()]
        time.sleep(0.01)
    return []


def notes_of(folder: Path, kind: str) -> list[Event]:
    lines = (folder / "notes.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def seconds(events: list[Event]) -> list[float]:
    return [event["end"] - event["begin"] for event in events]


def restarts(steps: list[Event], kills: list[float]) -> list[float]:
    """Seconds from a kill to the next step, if no other kill is between them."""
    found = []
    for kill, following in pairwise([*kills, float("inf")]):
        after = [step["begin"] for step in steps if step["begin"] > kill]
        if after and after[0] < following:
            found.append(after[0] - kill)
    return found


def row(folder: Path, every: int, between: float, kills: list[float]) -> Event:
    """Where the time of the run went, and both forms of the formula."""
    steps, saves = notes_of(folder, "step"), notes_of(folder, "save")
    wall = max(e["end"] for e in [*steps, *saves]) - steps[0]["begin"]
    kept = {step["step"]: step for step in steps}
    useful, saving = sum(seconds([*kept.values()])), sum(seconds(saves))
    step, again = useful / len(kept), restarts(steps, kills)
    checkpoint = statistics.mean(seconds(saves))
    restart = statistics.mean(again) if again else 0.0
    known = every * step, checkpoint, between, restart
    drawn, pieces = random.Random(0), max(1, len(kept) // every)
    likely = sorted(simulated(pieces, *known, drawn) for _ in range(1000))
    return {
        "steps": len(kept), "every": every, "kills": len(kills), "wall": wall,
        "useful": useful, "saving": saving, "redone": sum(seconds(steps)) - useful,
        "step": step, "checkpoint": checkpoint, "restart": restart,
        "between": between, "measured": useful / wall, "formula": goodput(*known),
        "simulated": (likely[50], likely[949]),
    }  # fmt: skip


def simulated(
    pieces: int, interval: float, checkpoint: float, between: float, restart: float,
    drawn: random.Random,
) -> float:  # fmt: skip
    """The share of one run of so many intervals, with kills that are drawn."""
    wall, left = 0.0, drawn.expovariate(1 / between)
    for _ in range(pieces):
        needed = interval + checkpoint
        while left < needed:
            wall, left = wall + left, drawn.expovariate(1 / between)
            needed = restart + interval + checkpoint
        wall, left = wall + needed, left - needed
    return pieces * interval / wall


def measure(work: float, between: float, seed: int) -> list[Event]:
    """Runs with checkpoints as Daly has them, and four times as far apart."""
    drawn = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        alone, found = Path(name) / "alone", []
        run(alone, 60, 10, 1e9, drawn)
        step = statistics.median(seconds(notes_of(alone, "step")))
        checkpoint = statistics.mean(seconds(notes_of(alone, "save")))
        best = max(1, round(daly_interval(checkpoint, between) / step))
        for every in (best, 4 * best):
            folder = Path(name) / str(every)
            kills = run(folder, round(work / step), every, between, drawn)
            found.append(row(folder, every, between, kills))
            print(found[-1], flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--work", type=float, default=150.0, help="seconds of steps, about")
    add("--between", type=float, default=20.0, help="mean seconds between kills")
    add("--seed", type=int, default=0)
    add("-o", "--output", type=Path)
    add("--rank", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.rank:
        train_noted(chosen.rank)
        return
    rows = measure(chosen.work, chosen.between, chosen.seed)
    if chosen.output:
        given = {"ranks": RANKS, "seed": chosen.seed}
        record = {"machine": describe(), "versions": versions(), **given, "rows": rows}
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
