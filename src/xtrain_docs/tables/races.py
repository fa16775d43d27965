"""Tables of the recorded races."""

from typing import TYPE_CHECKING

from .. import races
from ..values import bytes_, number, percent, seconds
from . import REGISTRY, Table

if TYPE_CHECKING:
    from xtrain.bench.record import Heat, Result


@REGISTRY
def race_results(race: str, ranks: int, record: str = "lc1") -> Table:
    """One race at every size: time, ratio, spread and dropped samples."""
    rows = []
    for heat in races.heats(record, race, ranks):
        for result in heat.results:
            size = bytes_(heat.size) if result is heat.results[0] else ""
            rows.append([size, *cells(result, heat)])
    header = ["tensor", "contestant", "time", "times as fast", "middle half of rounds",
              "dropped"]  # fmt: skip
    return Table(header, rows, "llrrrr")


def cells(result: "Result", heat: "Heat") -> list[str]:
    baseline = result is heat.results[0]
    time = "" if result.seconds is None else seconds(result.seconds)
    if baseline:
        speed, spread = "1", ""
    elif result.ratio is None:
        speed, spread = "not measured", ""
    else:
        speed = f"**{_times(result.ratio)}**"
        spread = _spread(result)
    dropped = f"{result.dropped} of {result.kept + result.dropped}"
    return [result.name, time, speed, spread, dropped]


def _spread(result: "Result") -> str:
    low, high = result.ratio_low, result.ratio_high
    if low is None or high is None:
        return ""
    return f"{low:.2f} to {high:.2f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


@REGISTRY
def race_goals(record: str = "lc1") -> Table:
    """Every goal beside what was measured."""
    rows = []
    for heat in races.record(record).heats:
        for result in heat.results:
            if result.goal is None:
                continue
            measured = "not measured"
            verdict = ""
            if result.ratio is not None:
                measured = _times(result.ratio)
                verdict = "met" if result.ratio >= result.goal else "**missed**"
            rows.append(
                [
                    f"{heat.title}: {result.name}",
                    bytes_(heat.size),
                    str(heat.ranks),
                    _times(result.goal),
                    measured,
                    verdict,
                ]
            )
    header = ["race", "tensor", "ranks", "goal", "measured", ""]
    return Table(header, rows, "lrrrrl")


@REGISTRY
def race_lost(record: str = "lc1") -> Table:
    """Every heat that the baseline won."""
    rows = [
        [
            heat.title,
            bytes_(heat.size),
            str(heat.ranks),
            result.name,
            _times(result.ratio),
            _spread(result),
        ]
        for heat in races.record(record).heats
        for result in heat.results
        if result.ratio is not None and result.ratio < 1
    ]
    header = ["race", "tensor", "ranks", "contestant", "times as fast",
              "middle half of rounds"]  # fmt: skip
    return Table(header, rows, "lrrlrr")


@REGISTRY
def race_bytes(race: str, size: int, ranks: int = 4, record: str = "lc1") -> Table:
    """What the busiest rank sends in one call: formula, ledger, sockets."""
    heat = races.record(record).heat(race, size, ranks)
    rows = [
        [
            result.name,
            _busiest(result.bytes_formula, "known to the backend only"),
            _busiest(result.bytes_sent, "no messages of ours"),
            _busiest(result.wire_bytes, "not counted"),
        ]
        for result in heat.results
    ]
    header = ["contestant", "formula", "ledger", "through the sockets"]
    return Table(header, rows, "lrrr")


def _busiest(counts: list[int] | None, otherwise: str) -> str:
    return otherwise if counts is None else number(max(counts))


@REGISTRY
def race_machine(record: str = "lc1") -> Table:
    """Where and how a record was made."""
    found = races.record(record)
    machine, settings = found.machine, found.settings
    memory = machine.get("memory_bytes")
    foreign = [h.foreign for h in found.heats if h.foreign is not None]
    rows = [
        ["command", f"`{found.command}`"],
        ["date", found.date],
        ["machine", f"{machine['cores']} cores, {machine['cpu']}"],
        ["memory", bytes_(memory) if memory else "unknown"],
        ["system", f"{machine['system']}, TCP {machine.get('tcp') or 'unknown'}"],
        ["versions", ", ".join(f"{k} {v}" for k, v in found.versions.items())],
        ["samples wanted", f"{settings['rounds']} of each contestant"],
        ["one sample", f"at least {seconds(settings['sample_seconds'])}"],
        ["dropped above", f"{percent(settings['foreign_limit'])} foreign load"],
        ["dropped", f"{races.race_dropped(record)} of {races.race_samples(record)}"],
    ]
    if foreign:
        rows.append(["foreign load in kept samples", f"up to {percent(max(foreign), 1)}"
                     " (median of a heat)"])  # fmt: skip
    return Table(["", ""], rows, "ll")
