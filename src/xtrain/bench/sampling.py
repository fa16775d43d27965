"""One sample of a contestant: its calls between two barriers, timed on all ranks.

    barrier, calls, barrier -> start, end, CPU seconds of every rank
    sample = (last end - last start) / calls

The machine was busy for longer than all ranks used its cores: the rest was others. A
sample with too much of that is dropped.
"""

import dataclasses
import math
import time

import torch
import torch.distributed as dist

from xtrain.bench import machine
from xtrain.bench.race import Case, Race, Trial, synchronize

# With a clock that grows in ticks, a sample must be long against a tick.
TICKS_PER_SAMPLE = 25


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure.

    `rounds` samples of each contestant are wanted, of at least `sample_seconds`
    each, in at most `most_rounds` rounds. `other_load_limit` is the share of the
    machine that others may use during a sample. After a dropped sample rank 0 waits
    for a quiet moment, altogether `patience` seconds in one measurement.
    """

    rounds: int = 15
    most_rounds: int = 45
    sample_seconds: float = 0.1
    warm_up_seconds: float = 0.2
    other_load_limit: float = 0.05
    patience: float = 30.0
    seed: int = 0


QUICK = Settings(
    rounds=5,
    most_rounds=10,
    sample_seconds=0.03,
    warm_up_seconds=0.05,
    other_load_limit=0.25,
    patience=0.0,
)
SINGLE_ROUNDS = 40  # times the rounds where a sample is a single call


def settings_for(race: Race, settings: Settings) -> Settings:
    """The settings of one race of a run: some races set their number of rounds.

    Where a sample is a single call there are more of them, and none is dropped.
    """
    if race.single:
        settings = dataclasses.replace(
            settings,
            rounds=SINGLE_ROUNDS * settings.rounds,
            most_rounds=SINGLE_ROUNDS * settings.most_rounds,
            other_load_limit=float("inf"),
        )
    if race.rounds is not None and race.rounds < settings.rounds:
        settings = dataclasses.replace(settings, rounds=race.rounds)
    return settings


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One contestant in one round: seconds per call, and others' share of the machine.

    `other_load` is None where the system does not tell.
    """

    seconds: float
    other_load: float | None


def keep(sample: Sample, limit: float) -> float | None:
    """The sample's time, or None when other processes were too busy."""
    if sample.other_load is not None and sample.other_load > limit:
        return None
    return sample.seconds


def warm_up(case: Case, trial: Trial, settings: Settings, length: float) -> int:
    """Run the trial for a while; return how many calls last about `length` seconds."""
    done, start = 0, time.perf_counter()
    calls = 1
    while True:
        dist.barrier()
        for _ in range(calls):
            trial.call()
        synchronize(case.device)
        done += calls
        elapsed = _max_over_ranks(time.perf_counter() - start, case.device)
        if elapsed >= settings.warm_up_seconds and done >= 2:
            return max(1, math.ceil(length * done / elapsed))
        calls = done


def _max_over_ranks(seconds: float, device: str) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def take_sample(
    case: Case, trial: Trial, calls: int, clock: machine.BusyClock
) -> Sample:
    """Time so many calls on all ranks together."""
    call = trial.call
    dist.barrier()
    busy, cpu = clock.read(), time.process_time()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(case.device)
    end = time.perf_counter()
    dist.barrier()
    # All ranks read their counters now, between a barrier and the next exchange.
    row = [
        start,
        end,
        time.process_time() - cpu,
        clock.read() - busy,
        time.perf_counter() - start,
    ]
    mine = torch.tensor(row, dtype=torch.float64, device=case.device)
    rows = torch.empty(case.ranks, len(row), dtype=mine.dtype, device=case.device)
    dist.all_gather(list(rows.unbind()), mine)
    starts, ends, cpus, busies, spans = rows.cpu().T.tolist()
    other_load = None
    if clock.known:
        others = max(0.0, busies[0] - sum(cpus))
        other_load = others / (spans[0] * machine.cores())
    return Sample((max(ends) - max(starts)) / calls, other_load)


def wait_for_quiet(clock: machine.BusyClock, limit: float, patience: float) -> float:
    """Sleep until others use less than the limit, at most `patience` seconds.

    Returns the seconds slept. The other ranks wait in the next barrier.
    """
    slept = 0.0
    pause = max(0.1, TICKS_PER_SAMPLE * clock.resolution)
    while slept < patience:
        busy = clock.read()
        time.sleep(pause)
        slept += pause
        if clock.read() - busy <= limit * pause * machine.cores():
            break
    return slept
