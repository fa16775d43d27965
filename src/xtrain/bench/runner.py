"""How a measurement is run, so that its ratio means something.

    on every rank, in one process group:
      check     each contestant once: its result, its bytes; any mistake ends it
      warm up   each contestant, and count the calls that fill one sample
      rounds    in each, every contestant once, in random order:
                  barrier, calls, barrier -> times and CPU seconds of all ranks

The sides alternate because a machine changes its speed from minute to minute: two
runs one after the other compare two moments, not two programs. A sample lasts from
when the last rank starts until the last rank ends. It is dropped when other
processes used more of the machine than the limit (`xtrain.bench.machine`); the rounds
go on until enough samples are kept, or the most rounds are done.

`contestant_checks`, `sampling` and `measurement` hold the three parts of it.
"""

import gc
import math
import random
from collections.abc import Iterable, Iterator
from itertools import islice

import torch.distributed as dist

from xtrain.bench import machine, peak_memory
from xtrain.bench.contestant_checks import check_contestants
from xtrain.bench.measurement import RankResult, all_or_none, measurement_of
from xtrain.bench.race import Case, Race
from xtrain.bench.race_record import Measurement
from xtrain.bench.sampling import (
    TICKS_PER_SAMPLE,
    Sample,
    Settings,
    keep,
    settings_for,
    take_sample,
    wait_for_quiet,
    warm_up,
)
from xtrain.testing import World


def run_measurement(
    world: World, race: Race, size: int, settings: Settings, rough: bool = False
) -> Measurement:
    """One race at one size on the ranks of `world`.

    With `rough` the samples of a busy machine stand where no others are.

    RaceError when a contestant leaves a wrong result or sends a wrong number of
    bytes: what is wrong is not timed.
    """
    case = Case(size, world.size, world.device)
    settings = settings_for(race, settings)
    ranks = world.run(run_on_rank, race, case, settings, timeout=None)
    peaks = _measure_memory(world, race, case)
    limit = settings.other_load_limit
    if rough and not all(_kept(taken, limit) for taken in ranks[0].samples.values()):
        limit = math.inf
    return measurement_of(race, case, world.backend, limit, ranks, peaks)


def _measure_memory(world: World, race: Race, case: Case) -> dict[str, list[int]]:
    """The peak of each contestant on each rank, in new processes for each of them."""
    peaks = {}
    for contestant in race.participants(case) if race.memory else ():
        with World(world.size, world.backend, world.device) as fresh:
            asked = contestant, case, race.checked_calls
            counts = fresh.run(peak_memory.peak_on_rank, *asked, timeout=None)
        known = all_or_none(counts)
        if known is not None:
            peaks[contestant.name] = known
    return peaks


def run_on_rank(race: Race, case: Case, settings: Settings) -> RankResult:
    """Body of one rank: check, warm up, and run the rounds."""
    clock = machine.BusyClock()
    length = max(settings.sample_seconds, TICKS_PER_SAMPLE * clock.resolution)
    checked = check_contestants(race, case, race.participants(case))
    trials = checked.trials
    calls = {
        name: warm_up(case, trial, settings, length) for name, trial in trials.items()
    }
    if race.single:
        calls = dict.fromkeys(calls, 1)
    samples: dict[str, list[Sample]] = {name: [] for name in trials}
    rounds = islice(orders(trials, settings.seed), settings.most_rounds)
    patience, limit = settings.patience, settings.other_load_limit
    gc.collect()
    gc.disable()
    try:
        for order in rounds:
            for name in order:
                sample = take_sample(case, trials[name], calls[name], clock)
                samples[name].append(sample)
                if keep(sample, limit) is None and dist.get_rank() == 0:
                    patience -= wait_for_quiet(clock, limit, patience)
            if min(_kept(s, limit) for s in samples.values()) >= settings.rounds:
                break
    finally:
        gc.enable()
    return RankResult(samples, calls, checked.sent, checked.formula, checked.wire)


def orders(contestants: Iterable[str], seed: int) -> Iterator[list[str]]:
    """The contestants in the order of each round, which is the same on every rank."""
    order = list(contestants)
    shuffle = random.Random(seed).shuffle
    while True:
        shuffle(order)
        yield list(order)


def _kept(samples: list[Sample], limit: float) -> int:
    return sum(keep(sample, limit) is not None for sample in samples)
