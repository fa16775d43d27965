"""For the page of races: what is raced, and why a goal was missed."""

from typing import TYPE_CHECKING

from ... import races
from ...tables import REGISTRY, Table
from ...values import bytes_, percent, seconds, times

if TYPE_CHECKING:
    from xtrain.bench.record import Measurement

MESSAGES = 4  # dispatch and combine, of a forward and of a backward


@REGISTRY
def expert_races() -> Table:
    """The layers that are raced: tokens, sizes, experts and ranks."""
    from xtrain.bench.experts import NUM_EXPERTS, TOP_K
    from xtrain.bench.races.lc7 import FEW, MANY, NARROW, PAIR, PAIR_EXPERTS, WIDE

    layers = (
        ("few tokens", NARROW, FEW, NUM_EXPERTS, 1),
        ("many tokens", WIDE, MANY, NUM_EXPERTS, 1),
        ("expert ranks", WIDE, MANY, NUM_EXPERTS, 2),
        ("overlap, each micro-batch", WIDE, PAIR, PAIR_EXPERTS, 2),
    )
    rows = [
        [name, str(size // sizes.bytes_of(1)), str(sizes.hidden), str(sizes.inner),
         str(experts), str(TOP_K), bytes_(size), str(ranks)]
        for name, sizes, size, experts, ranks in layers
    ]  # fmt: skip
    header = ["race", "tokens", "hidden size", "inner size", "experts", "top k",
              "tokens in fp32", "ranks"]  # fmt: skip
    return Table(header, rows, "lrrrrrrr")


# -------------------------------------------------------------- what was missed


@REGISTRY
def expert_misses(record: str = "lc7") -> Table:
    """Every goal that was missed on the first machine, and what the record says why."""
    rows = []
    for measurement in races.record(record).measurements:
        for result in measurement.results:
            if result.goal is None or races.ratio(result) >= result.goal:
                continue
            rows.append([f"{measurement.title}: {result.name}", times(result.goal),
                         times(races.ratio(result)), reason(measurement)])  # fmt: skip
    header = ["race", "goal", "measured", "what the record says"]
    return Table(header, rows or [["nothing", "", "", ""]], "lrrl")


def reason(measurement: "Measurement") -> str:
    """One sentence, whose numbers come from the same measurement."""
    load = measurement.other_load
    busy = "" if load is None else f"; others used {percent(load)} of the machine"
    if measurement.race == "overlap":
        return of_overlap(measurement) + busy
    ours, best = measurement.result("ours"), measurement.results[0]
    assert ours.seconds is not None and best.seconds is not None
    apart = f"{seconds(ours.seconds)} against {seconds(best.seconds)}"
    if measurement.race.startswith("transformers"):
        why = (
            "the many small steps around the products; gate and up in one matrix, as "
            "transformers has them, was tried and gains little"
        )
    else:
        why = "each product is long, so calls cost little, and both compute the same"
    return f"{apart}: {why}{busy}"


def of_overlap(measurement: "Measurement") -> str:
    """How much of the delays is hidden."""
    from xtrain.bench.races.lc7 import LATENCY

    apart, together = (
        measurement.result(name).seconds
        for name in ("one after the other", "overlapped")
    )
    assert apart is not None and together is not None
    delays = MESSAGES * LATENCY
    return (
        f"{seconds(apart)} one after the other, of which {seconds(delays)} are delays; "
        f"overlapping hides {seconds(max(0.0, apart - together))}"
    )
