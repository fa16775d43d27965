"""For the page of races: a ring's critical path, and why a goal was missed."""

from typing import TYPE_CHECKING

from xtrain.plan import critical_pairs

from ... import races, runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table
from ...values import bytes_, percent, seconds, times

if TYPE_CHECKING:
    from xtrain.bench.record import Measurement

BALANCES = {"none": "contiguous", "striped": "striped", "zigzag": "zigzag"}
LENGTH = 32  # tokens of each rank
GOAL = 1.6


def critical_path(balance: str, ranks: int) -> tuple[int, int]:
    """Pairs of the busiest rank, summed over the steps; and of all ranks together.

    EvidenceError unless the first is the closed form and the second all pairs.
    """
    from .runs_race import pairs_by_step

    found = runs.remembered(pairs_by_step, ranks, balance, LENGTH)
    path = sum(max(step) for step in zip(*found, strict=True))
    total = sum(map(sum, found))
    tokens = ranks * LENGTH
    if (path, total) != (
        critical_pairs(balance, ranks, LENGTH),
        tokens * (tokens + 1) // 2,
    ):
        raise EvidenceError(f"{balance} on {ranks} ranks: {path}, {total} pairs")
    return path, total


@REGISTRY
def ring_critical_path(ranks: int = 8) -> Table:
    """Contiguous, striped and zigzag: pairs that the ranks wait for."""
    slowest, total = critical_path("none", ranks)
    rows = []
    for balance, name in BALANCES.items():
        path, _ = critical_path(balance, ranks)
        ratio = slowest / path
        verdict = ""
        if balance == "zigzag":
            verdict = "met" if ratio >= GOAL else "**missed**"
        aim = times(GOAL) if verdict else ""
        share = f"{total / ranks / path:.3f}"
        rows.append([name, count(path), share, times(ratio), aim, verdict])
    header = ["tokens are", "pairs on the critical path", "ideal over that",
              "times as few as contiguous", "goal", ""]  # fmt: skip
    return Table(header, rows, "lrrrrl")


@REGISTRY
def attention_races() -> Table:
    """Every race with its tokens, heads and ranks."""
    from xtrain.bench.attention import HEAD_DIM, HEADS, TOKEN_BYTES
    from xtrain.bench.races.lc6 import RACES

    rows = [
        [
            race.name.replace("_", " "),
            str(race.sizes[0] // TOKEN_BYTES),
            str(HEADS),
            str(HEAD_DIM),
            bytes_(race.sizes[0]),
            " and ".join(map(str, race.ranks)),
        ]
        for race in RACES
    ]
    header = ["race", "tokens", "heads", "head dim", "q of all tokens", "ranks"]
    return Table(header, rows, "lrrrrr")


# -------------------------------------------------------------- what was missed


@REGISTRY
def attention_misses(record: str = "lc6") -> Table:
    """Every goal that was missed on the first machine, and what the record says why."""
    rows = []
    for measurement in races.record(record).measurements:
        for result in measurement.results:
            if result.goal is None or races.ratio(result) >= result.goal:
                continue
            baseline = measurement.results[0].name
            rows.append([f"{measurement.title}: {result.name} against {baseline}",
                         times(result.goal), times(races.ratio(result)),
                         reason(measurement, result.goal)])  # fmt: skip
    header = ["race", "goal", "measured", "what the record says"]
    return Table(header, rows or [["nothing", "", "", ""]], "lrrl")


def reason(measurement: "Measurement", goal: float) -> str:
    """One sentence, whose numbers come from the other contestants."""
    if measurement.race == "sleeping":
        return of_sleep(measurement)
    if measurement.ranks == 1:
        return of_blocks(measurement, goal)
    return of_ring(measurement)


def took(measurement: "Measurement", name: str) -> float:
    """Median seconds; ValueError when all samples were dropped."""
    found = measurement.result(name).seconds
    if found is None:
        raise ValueError(f"{measurement.race}: {name} was not measured")
    return found


def of_blocks(measurement: "Measurement", goal: float) -> str:
    """The kernel without blocks is the most that blocks can reach."""
    most = races.ratio(measurement.result("SDPA"))
    cost = took(measurement, "fused blocks") / took(measurement, "SDPA") - 1
    text = f"one call of torch's kernel, without blocks, reaches {times(most)}"
    ends = ", so no cut into blocks could meet the goal" if most < goal else ""
    return f"{text}{ends}; cutting and merging cost {percent(cost)} beside it"


def of_ring(measurement: "Measurement") -> str:
    """Beside an equal share of the work, and with a transport without sockets."""
    share = took(measurement, "one process") / measurement.ranks
    ring, shm = (took(measurement, n) - share for n in ("ring", "ring on xtrain-shm"))
    load = measurement.other_load
    busy = "" if load is None else f"; others used {percent(load)} of the machine"
    return (
        f"an equal share of one process's time is {seconds(share)}; the ring takes "
        f"{seconds(ring)} more on gloo, {seconds(shm)} more on shared memory{busy}"
    )


def of_sleep(measurement: "Measurement") -> str:
    """What a step takes beyond the sleep of its critical path."""
    from xtrain.bench.races.lc6 import PAIR

    slowest, zigzag = (
        critical_pairs(balance, measurement.ranks, LENGTH)
        for balance in ("none", "zigzag")
    )
    most, slept = slowest / zigzag, 2 * PAIR * zigzag  # forward and backward
    rest = took(measurement, "zigzag") - slept
    return (
        f"the critical paths differ {times(most)}; zigzag sleeps {seconds(slept)} on "
        f"its own, and takes {seconds(rest)} beside that for messages and waking"
    )
