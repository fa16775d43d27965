"""From what the ranks return to a `Measurement`: medians, ratios, bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xtrain.bench import medians
from xtrain.bench.contestant_checks import Counts
from xtrain.bench.race import Case, Race
from xtrain.bench.record import Measurement, Result
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
            Result(
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
    return medians.quantile(loads, 0.5) if loads else None


def _bytes(ranks: Sequence[RankResult], name: str) -> dict[str, Any]:
    return {
        "bytes_sent": all_or_none([rank.bytes_sent[name] for rank in ranks]),
        "bytes_formula": all_or_none([rank.bytes_formula[name] for rank in ranks]),
        "wire_bytes": all_or_none([rank.wire_bytes[name] for rank in ranks]),
    }


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


def all_or_none(counts: list[int | None]) -> list[int] | None:
    """The counts, unless one of them is not known."""
    known = [count for count in counts if count is not None]
    return known if len(known) == len(counts) else None
