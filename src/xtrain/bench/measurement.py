"""From what the ranks return to a `Measurement`: medians, ratios, bytes.

Times of one contestant are summarised by their median, which slow outliers hardly move.
Two contestants are compared by the ratio of their medians. Its spread are the quartiles
of the ratios of single rounds, in which both ran one right after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xtrain.bench.contestant_checks import Counts
from xtrain.bench.race import Case, Race
from xtrain.bench.race_record import ContestantResult, Measurement
from xtrain.bench.sampling import Sample, keep


@dataclass(frozen=True)
class RankResult:
    """What one rank returns from a measurement, by contestant.

    Samples and calls are the same on every rank; the bytes are its own.
    """

    samples: dict[str, list[Sample]]
    calls: dict[str, int]
    bytes_sent: Counts
    bytes_formula: Counts
    wire_bytes: Counts


def measurement_of(
    race: Race,
    case: Case,
    backend: str,
    limit: float,
    ranks: Sequence[RankResult],
    peaks: dict[str, list[int]],
) -> Measurement:
    """One race at one size, from the results of all ranks.

    Args:
        limit: samples during which others used more of the machine are dropped.
        peaks: the most memory that each rank took, by contestant, where it was asked.
    """
    times = {
        name: [keep(sample, limit) for sample in samples]
        for name, samples in ranks[0].samples.items()
    }
    baseline = times[race.contestants[0].name]
    return Measurement(
        race=race.name,
        title=race.title,
        size=case.size,
        ranks=case.ranks,
        backend=backend,
        rounds=len(baseline),
        other_load=_median_load(ranks[0], limit),
        results=[
            ContestantResult(
                name=contestant.name,
                **_times(times[contestant.name]),
                calls=ranks[0].calls[contestant.name],
                **_ratios(
                    baseline,
                    times[contestant.name],
                    own=contestant is race.contestants[0],
                ),
                goal=race.goal(contestant.name, case),
                **_bytes(ranks, contestant.name),
                peak_bytes=peaks.get(contestant.name),
            )
            for contestant in race.participants(case)
        ],
    )


def _median_load(result: RankResult, limit: float) -> float | None:
    """Others' share of the machine during the kept samples; None if unknown."""
    loads = [
        sample.other_load
        for samples in result.samples.values()
        for sample in samples
        if sample.other_load is not None and keep(sample, limit) is not None
    ]
    return quantile(loads, 0.5) if loads else None


def _bytes(ranks: Sequence[RankResult], name: str) -> dict[str, Any]:
    return {
        "bytes_sent": all_or_none([rank.bytes_sent[name] for rank in ranks]),
        "bytes_formula": all_or_none([rank.bytes_formula[name] for rank in ranks]),
        "wire_bytes": all_or_none([rank.wire_bytes[name] for rank in ranks]),
    }


def _times(samples: Sequence[float | None]) -> dict[str, Any]:
    times = [seconds for seconds in samples if seconds is not None]
    shares = {"seconds": 0.5, "seconds_low": 0.25, "seconds_high": 0.75}
    return {
        **{name: quantile(times, at) if times else None for name, at in shares.items()},
        "kept": len(times),
        "dropped": len(samples) - len(times),
    }


def _ratios(
    baseline: Sequence[float | None], times: Sequence[float | None], own: bool
) -> dict[str, Any]:
    found = None if own else compare(baseline, times)
    return dict(
        zip(("ratio", "ratio_low", "ratio_high"), found or (None,) * 3, strict=True)
    )


def compare(
    baseline: Sequence[float | None], contestant: Sequence[float | None]
) -> tuple[float, float, float] | None:
    """Baseline over contestant (above 1, the contestant is faster), and its spread.

    The ratio of medians, and the quartiles of the rounds' ratios. Times have one entry
    per round, None for a dropped sample; None when no round has both.
    """
    pairs = zip(baseline, contestant, strict=True)
    ratios = [b / c for b, c in pairs if b is not None and c is not None]
    if not ratios:
        return None
    first, second = (
        quantile([t for t in times if t is not None], 0.5)
        for times in (baseline, contestant)
    )
    return first / second, quantile(ratios, 0.25), quantile(ratios, 0.75)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours.

    ValueError for no values.
    """
    if not values:
        raise ValueError("no values: every sample was dropped")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def all_or_none(counts: list[int | None]) -> list[int] | None:
    """The counts, unless one of them is not known."""
    known = [count for count in counts if count is not None]
    return known if len(known) == len(counts) else None
