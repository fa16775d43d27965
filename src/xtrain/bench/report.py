"""Measurements as a text table for the terminal."""

from xtrain.bench.race_record import ContestantResult, Measurement
from xtrain.bench.sampling import Settings


def measurement_lines(measurement: Measurement) -> list[str]:
    """One measurement: a headline, a header and one line per contestant."""
    rows = [
        ["contestant", "time", "ratio", "quartiles", "sent per rank", "dropped", ""]
    ]
    rows += [_row(result, measurement) for result in measurement.results]
    if any(result.peak_bytes for result in measurement.results):
        for row, cell in zip(
            rows, ["peak", *map(peak_text, measurement.results)], strict=True
        ):
            row.insert(5, cell)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    where = f"{measurement.ranks} ranks on {measurement.backend}"
    lines = [f"{measurement.title}, {bytes_text(measurement.size)}, {where}"]
    for row in rows:
        cells = [
            cell.ljust(width) if column in (0, 4, len(row) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def caveat_lines(measurement: Measurement, settings: Settings) -> list[str]:
    """A warning where other processes used much of the machine during a quick run."""
    load = measurement.other_load
    if load is None or load <= settings.other_load_limit:
        return []
    return [f"  rough: other processes used {load:.0%} of the machine"]


def _row(result: ContestantResult, measurement: Measurement) -> list[str]:
    baseline = result is measurement.results[0]
    time = "-" if result.seconds is None else seconds_text(result.seconds)
    ratio = "-" if result.ratio is None else f"{result.ratio:.2f}x"
    spread = "-"
    if result.ratio_low is not None and result.ratio_high is not None:
        spread = f"{result.ratio_low:.2f}-{result.ratio_high:.2f}"
    return [
        result.name,
        time,
        "1.00x" if baseline and result.seconds is not None else ratio,
        spread,
        sent_text(result),
        f"{result.dropped} of {result.kept + result.dropped}",
        goal_text(result),
    ]


def sent_text(result: ContestantResult) -> str:
    """What a rank sends in one call, and how that is known."""
    if result.bytes_sent is not None:
        return f"{_span(result.bytes_sent)} = formula"
    if result.bytes_formula is not None:
        return f"{_span(result.bytes_formula)} by formula"
    if result.wire_bytes is not None:
        return f"{_span(result.wire_bytes)} on the wire"
    return "-"


def peak_text(result: ContestantResult) -> str:
    """The most memory that any rank took."""
    return "-" if result.peak_bytes is None else bytes_text(max(result.peak_bytes))


def goal_text(result: ContestantResult) -> str:
    """The goal and whether it was met; empty without a goal."""
    if result.goal is None:
        return ""
    if result.ratio is None:
        return f"goal {result.goal:g}x: not measured"
    met = "met" if result.ratio >= result.goal else "missed"
    return f"goal {result.goal:g}x: {met}"


def _span(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return bytes_text(low) if low == high else f"{bytes_text(low)}-{bytes_text(high)}"


def bytes_text(count: float) -> str:
    """1572864 as `1.5 MiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """0.0042 as `4.20 ms`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us"
