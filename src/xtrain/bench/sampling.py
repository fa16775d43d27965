"""One sample of a contestant: its calls between two barriers, timed on all ranks.

    barrier, calls, barrier -> start, end, CPU seconds of every rank
    sample = (last end - last start) / calls

The machine was busy for longer than all ranks used its cores: the rest was others. A
sample with too much of that is dropped.
"""

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xtrain.bench import machine
from xtrain.bench.race import Case, Trial, synchronize
from xtrain.bench.settings import Settings

# With a clock that grows in ticks, a sample must be long against a tick.
TICKS_PER_SAMPLE = 25


@dataclass(frozen=True, slots=True)
class Sample:
    """One contestant in one round: seconds per call, and others' share of the machine.

    `other_load` is None where the system does not tell.
    """

    seconds: float
    other_load: float | None


def keep(sample: Sample, limit: float) -> float | None:
    """The sample's time, or None when others were too busy meanwhile."""
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
