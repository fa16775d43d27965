"""Fit the constants of the model of time on published runs, and say how far off it is.

    python -m xtrain.plan.fit docs/data/runs/runs.csv

Two thirds of the runs, drawn by SEED, are fitted; the other third is for the error. The
loss is the mean of |log(estimated / measured)|, each run weighted by one over the root
of how many its collection has of that accelerator, plus what pairs of layouts of one
model on one machine are ordered wrongly. One constant after the other is moved by a
shrinking factor as long as that lowers the loss.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from math import exp, log
from pathlib import Path

from xtrain.plan.runs import Run, judged, read_runs
from xtrain.plan.time_constants import FITTED, TimeConstants

SEED = 30
PAIRS = 0.3
"""Weight of a pair ordered wrongly, against a run that is off by a factor of e."""
APART = 0.1
"""Layouts whose measured rates differ by less are not ordered."""
MOST = 1.0
"""A run further off than a factor of e counts as if it were."""
START = TimeConstants(
    products=0.85, thin=1.5, unaligned=0.05, products_fp8=0.7, products_fp4=0.6,
    casts=1.0, grouped=0.8, flash=0.6, softmax=1.0, older_softmax=4.0, scores=6.0,
    element_wise=1.3, permutation=2.0, imbalance=1.1, launch=8e-6, inside=0.7,
    between=0.8,
    expert_waits=0.6, buckets_hidden=0.5, last_hidden=0.3,
    gather_hidden=0.1, interference=0.1, step=0.01, stragglers=0.005, messages=1.0,
    accumulate=0.5, pieces=0.5, call=5e-5,
)  # fmt: skip
LIMITS = {
    "products": (0.5, 1.0), "products_fp8": (0.3, 1.0), "products_fp4": (0.2, 1.0),
    "unaligned": (0.02, 1.0), "casts": (0.1, 8.0), "softmax": (0.3, 4.0),
    "older_softmax": (0.5, 12.0),
    "buckets_hidden": (0.02, 1.0), "last_hidden": (0.02, 1.0),
    "gather_hidden": (0.02, 1.0),
    "grouped": (0.3, 1.0), "flash": (0.3, 0.9), "inside": (0.3, 0.95),
    "between": (0.2, 0.95),
    "expert_waits": (0.1, 1.0), "thin": (0.3, 8.0),
    "interference": (0.02, 0.6), "imbalance": (1.0, 1.6),
    "element_wise": (0.7, 4.0), "permutation": (0.7, 6.0), "scores": (3.0, 20.0),
    "launch": (1e-6, 2e-5), "step": (1e-4, 0.05), "stragglers": (1e-4, 0.03),
    "messages": (0.3, 10.0), "accumulate": (0.1, 2.0), "pieces": (0.05, 1.0),
    "call": (1e-6, 1e-3),
}  # fmt: skip
"""What a constant can mean: shares below 1, bytes that pass at least about once."""


def divided(runs: Sequence[Run], seed: int = SEED) -> tuple[list[Run], list[Run]]:
    """(two thirds to fit, one third to judge), drawn by the seed."""
    drawn = sorted(runs, key=lambda run: run.name)
    random.Random(seed).shuffle(drawn)
    most = 2 * len(drawn) // 3
    return drawn[:most], drawn[most:]


def weights(runs: Sequence[Run]) -> list[float]:
    """So that a collection of a hundred runs weighs as ten of one run each."""
    count: dict[tuple[str, str, str], int] = defaultdict(int)
    for run in runs:
        count[run.prefix, run.accelerator, run.kind] += 1
    raw = [count[run.prefix, run.accelerator, run.kind] ** -0.5 for run in runs]
    return [one / sum(raw) for one in raw]


def pairs_of(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Pairs (faster, slower) of layouts of one model on one machine."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        machine = run.prefix, run.accelerator, run.layout.gpus
        groups[(*machine, run.model, run.sequence, run.precision)].append(at)
    found = []
    for group in groups.values():
        for first in group:
            for second in group:
                same = runs[first].layout == runs[second].layout
                faster = runs[first].measured > (1 + APART) * runs[second].measured
                if faster and not same:
                    found.append((first, second))
    return found


def named(runs: Sequence[Run], constants: TimeConstants = FITTED) -> tuple[int, int]:
    """(pairs whose faster layout is named, all pairs)."""
    rates = [run.ratio(constants) * run.measured for run in runs]
    pairs = pairs_of(runs)
    return sum(rates[fast] > rates[slow] for fast, slow in pairs), len(pairs)


class Loss:
    """Of constants, on these runs."""

    def __init__(self, runs: Sequence[Run]):
        self.runs, self.weights, self.pairs = runs, weights(runs), pairs_of(runs)

    def of(self, constants: TimeConstants) -> float:
        """Weighted mean of the error of runs, and of pairs ordered wrongly."""
        ratios = [run.ratio(constants) for run in self.runs]
        total = sum(
            weight * min(abs(log(ratio)), MOST)
            for weight, ratio in zip(self.weights, ratios, strict=True)
        )
        rates = [
            ratio * run.measured for ratio, run in zip(ratios, self.runs, strict=True)
        ]
        wrong = 0.0
        for fast, slow in self.pairs:  # a smooth step of a tenth
            lead = max(-60.0, min(60.0, 20 * log(rates[fast] / rates[slow])))
            wrong += 1 / (1 + exp(lead))
        return total + PAIRS * wrong / max(len(self.pairs), 1)


def fit(runs: Sequence[Run], rounds: int = 8, step: float = 0.3) -> TimeConstants:
    """The constants with least loss that this walk finds."""
    loss = Loss(runs)
    best, least = START, loss.of(START)
    for _ in range(rounds):
        for name in TimeConstants._fields:
            low, high = LIMITS[name]
            for factor in (1 + step, 1 / (1 + step)):
                while True:
                    value = min(max(getattr(best, name) * factor, low), high)
                    tried = best._replace(**{name: value})
                    found = loss.of(tried) if tried != best else least
                    if found >= least - 1e-6:
                        break
                    best, least = tried, found
        step *= 0.6
    return rounded(best)


def rounded(constants: TimeConstants) -> TimeConstants:
    """To three digits."""
    return TimeConstants(*(float(f"{value:.3g}") for value in constants))


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the nearest one."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def errors(runs: Sequence[Run], constants: TimeConstants = FITTED) -> list[float]:
    """Estimated over measured, minus 1, of each run; 0.1 is a tenth too fast."""
    return [run.ratio(constants) - 1 for run in runs]


def report(runs: Sequence[Run], constants: TimeConstants = FITTED) -> str:
    """Median and nine of ten of the error, range of the ratios, pairs."""
    lines = []
    for kind in ("dense", "experts"):
        chosen = [run for run in runs if run.kind == kind]
        if not chosen:
            continue
        off = errors(chosen, constants)
        size = [abs(one) for one in off]
        spread = [1 / (1 + one) for one in off]
        lines.append(
            f"{kind:8} {len(chosen):4} runs: median {quantile(size, 0.5):.1%}, "
            f"nine of ten within {quantile(size, 0.9):.1%}, measured / estimated "
            f"{quantile(spread, 0.1):.2f} to {quantile(spread, 0.9):.2f}"
        )
    right, all_ = named(runs, constants)
    lines.append(f"pairs    {right} of {all_} named right")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    fitted, others = divided(judged(read_runs(arguments.runs)[0]))
    constants = fit(fitted, arguments.rounds)
    print(f"seed {SEED}: {len(fitted)} runs fitted, {len(others)} not")
    for name, value in constants._asdict().items():
        print(f"    {name}={value:g},")
    print("fitted\n" + report(fitted, constants))
    print("not fitted\n" + report(others, constants))


if __name__ == "__main__":
    main()
