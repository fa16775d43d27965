"""How a measurement is run, so that its ratio means something.

    on every rank, in one process group:
      check     each contestant once: its result, its bytes; any mistake ends it
      warm up   each contestant, and count the calls that fill one sample
      rounds    in each, every contestant once, in random order:
                  barrier, calls, barrier -> times and CPU seconds of all ranks

The sides alternate because a machine changes its speed from minute to minute: two
runs one after the other compare two moments, not two programs. A sample lasts from
when the last rank starts until the last rank ends. It is dropped when other
processes used more of the machine than the limit meanwhile (`xtrain.bench.machine`);
the rounds go on until enough samples are kept, or the most rounds are done.
"""

import dataclasses
import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.bench import machine, medians, memory
from xtrain.bench.race import Case, Contestant, Race, RaceError, Trial, synchronize
from xtrain.bench.record import Measurement, Result
from xtrain.comm import CommLedger
from xtrain.testing import World

Counts = dict[str, int | None]
"""Bytes of each contestant, by name."""


@dataclass(frozen=True, slots=True)
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
# With a clock that grows in ticks, a sample must be long against a tick.
TICKS_PER_SAMPLE = 25


@dataclass(frozen=True, slots=True)
class Sample:
    """One contestant in one round: seconds per call, and others' share of the machine.

    `other_load` is None where the system does not tell.
    """

    seconds: float
    other_load: float | None


@dataclass(frozen=True)
class RankResult:
    """What one rank brings home from a measurement, by contestant.

    Samples and calls are the same on every rank; the bytes are its own.
    """

    samples: dict[str, list[Sample]]
    calls: dict[str, int]
    bytes_sent: dict[str, int | None]
    bytes_formula: dict[str, int | None]
    wire_bytes: dict[str, int | None]


def run_measurement(
    world: World, race: Race, size: int, settings: Settings
) -> Measurement:
    """One race at one size on the ranks of `world`.

    RaceError when a contestant leaves a wrong result or sends a wrong number of
    bytes: what is wrong is not timed.
    """
    case = Case(size, world.size, world.device)
    if race.single:
        settings = dataclasses.replace(
            settings,
            rounds=SINGLE_ROUNDS * settings.rounds,
            most_rounds=SINGLE_ROUNDS * settings.most_rounds,
            other_load_limit=float("inf"),
        )
    if race.rounds is not None and race.rounds < settings.rounds:
        settings = dataclasses.replace(settings, rounds=race.rounds)
    ranks = world.run(run_on_rank, race, case, settings, timeout=None)
    first = ranks[0]
    kept = {
        name: [keep(sample, settings.other_load_limit) for sample in samples]
        for name, samples in first.samples.items()
    }
    baseline = kept[race.contestants[0].name]
    results = []
    peaks = _measure_memory(world, race, case)
    for contestant in race.participants(case):
        name = contestant.name
        own = contestant is race.contestants[0]
        results.append(
            Result(
                name=name,
                **_times(kept[name]),
                calls=first.calls[name],
                **_ratios(baseline, kept[name], own),
                goal=race.goal(name, case),
                bytes_sent=_all_or_none([rank.bytes_sent[name] for rank in ranks]),
                bytes_formula=_all_or_none(
                    [rank.bytes_formula[name] for rank in ranks]
                ),
                wire_bytes=_all_or_none([rank.wire_bytes[name] for rank in ranks]),
                peak_bytes=peaks.get(name),
            )
        )
    other_load = [
        sample.other_load
        for samples in first.samples.values()
        for sample in samples
        if sample.other_load is not None
        and keep(sample, settings.other_load_limit) is not None
    ]
    return Measurement(
        race=race.name,
        title=race.title,
        size=size,
        ranks=world.size,
        backend=world.backend,
        rounds=len(baseline),
        other_load=medians.quantile(other_load, 0.5) if other_load else None,
        results=results,
    )


def _measure_memory(world: World, race: Race, case: Case) -> dict[str, list[int]]:
    """The peak of each contestant on each rank, in new processes for each of them."""
    peaks = {}
    for contestant in race.participants(case) if race.memory else ():
        with World(world.size, world.backend, world.device) as fresh:
            counts = fresh.run(
                memory.peak_on_rank, contestant, case, race.checked_calls, timeout=None
            )
        known = _all_or_none(counts)
        if known is not None:
            peaks[contestant.name] = known
    return peaks


def keep(sample: Sample, limit: float) -> float | None:
    """The sample's time, or None when others were too busy meanwhile."""
    if sample.other_load is not None and sample.other_load > limit:
        return None
    return sample.seconds


def _times(samples: Sequence[float | None]) -> dict[str, Any]:
    times = [seconds for seconds in samples if seconds is not None]
    found = medians.summarize(times) if times else None
    return {
        "seconds": found.median if found else None,
        "seconds_low": found.low if found else None,
        "seconds_high": found.high if found else None,
        "kept": len(times),
        "dropped": len(samples) - len(times),
    }


def _ratios(
    baseline: Sequence[float | None], times: Sequence[float | None], own: bool
) -> dict[str, Any]:
    both = any(
        b is not None and t is not None for b, t in zip(baseline, times, strict=True)
    )
    if own or not both:
        return dict.fromkeys(("ratio", "ratio_low", "ratio_high"))
    found = medians.compare(baseline, times)
    return {"ratio": found.ratio, "ratio_low": found.low, "ratio_high": found.high}


def _all_or_none(counts: list[int | None]) -> list[int] | None:
    known = [count for count in counts if count is not None]
    return known if len(known) == len(counts) else None


# ------------------------------------------------------------- on every rank


def run_on_rank(race: Race, case: Case, settings: Settings) -> RankResult:
    """Body of one rank: check, warm up, and run the rounds."""
    clock = machine.BusyClock()
    length = max(settings.sample_seconds, TICKS_PER_SAMPLE * clock.resolution)
    participants = race.participants(case)
    trials, sent, formula, wire = _check_all(race, case, participants)
    calls = {
        name: _warm_up(case, trial, settings, length) for name, trial in trials.items()
    }
    if race.single:
        calls = dict.fromkeys(calls, 1)
    samples: dict[str, list[Sample]] = {name: [] for name in trials}
    order = list(trials)
    shuffle = random.Random(settings.seed).shuffle  # the same order on every rank
    patience = settings.patience
    gc.collect()
    gc.disable()
    try:
        for _ in range(settings.most_rounds):
            shuffle(order)
            for name in order:
                sample = _sample(case, trials[name], calls[name], clock)
                samples[name].append(sample)
                if (
                    keep(sample, settings.other_load_limit) is None
                    and dist.get_rank() == 0
                ):
                    patience -= _wait_for_quiet(
                        clock, settings.other_load_limit, patience
                    )
            if min(_kept(s, settings) for s in samples.values()) >= settings.rounds:
                break
    finally:
        gc.enable()
    return RankResult(samples, calls, sent, formula, wire)


def _kept(samples: list[Sample], settings: Settings) -> int:
    return sum(
        keep(sample, settings.other_load_limit) is not None for sample in samples
    )


def _check_all(
    race: Race, case: Case, participants: list[Contestant]
) -> tuple[dict[str, Trial], Counts, Counts, Counts]:
    trials: dict[str, Trial] = {}
    sent: Counts = {}
    formula: Counts = {}
    wire: Counts = {}
    expected = race.reference(case) if race.reference else None
    for contestant in participants:
        trial = contestant.make(case)
        dist.barrier()
        with CommLedger() as ledger:
            trial.call()
            synchronize(case.device)
        for _ in range(1, race.checked_calls):
            trial.call()
        name = contestant.name
        if expected is None:
            expected = [output.detach().clone() for output in trial.outputs]
        problem = _wrong_result(trial.outputs, expected, race.tolerance)
        sent[name] = formula[name] = None
        if contestant.traffic is not None:
            exact = contestant.traffic(case)
            rank = dist.get_rank()
            formula[name] = exact.sent[rank]
            if all(event.nbytes is not None for event in ledger.events):
                sent[name] = ledger.bytes_sent
                problem = problem or _wrong_bytes(
                    "sent", ledger.bytes_sent, exact.sent[rank]
                )
                problem = problem or _wrong_bytes(
                    "received", ledger.bytes_received, exact.received[rank]
                )
        wire[name] = ledger.wire_bytes
        _refuse(f"{race.name}: {name}, {case.size} bytes", problem)
        if trial.reset is not None:
            trial.reset()
        trials[name] = trial
    return trials, sent, formula, wire


def _wrong_result(
    outputs: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> str | None:
    shapes = [list(t.shape) for t in outputs], [list(t.shape) for t in expected]
    if shapes[0] != shapes[1]:
        return f"leaves tensors of shapes {shapes[0]}, expected {shapes[1]}"
    for index, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        if torch.equal(output, right):
            continue
        error = (output.double() - right.double()).abs()
        worst = float(error.max())
        if not worst <= tolerance:  # also when it is not a number
            wrong = int((~(error <= tolerance)).sum())
            return (
                f"output {index} differs in {wrong} of {output.numel()} elements, "
                f"by up to {worst:g}"
            )
    return None


def _wrong_bytes(what: str, counted: int, formula: int) -> str | None:
    if counted == formula:
        return None
    return f"{what} {counted} bytes, the formula says {formula}"


def _refuse(who: str, problem: str | None) -> None:
    """Raise on every rank when any has a problem, so that nobody waits."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [f"rank {rank} {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise RaceError(f"{who}: " + "; ".join(found))


def _warm_up(case: Case, trial: Trial, settings: Settings, length: float) -> int:
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


def _sample(case: Case, trial: Trial, calls: int, clock: machine.BusyClock) -> Sample:
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


def _wait_for_quiet(clock: machine.BusyClock, limit: float, patience: float) -> float:
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
