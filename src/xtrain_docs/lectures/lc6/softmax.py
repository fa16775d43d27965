"""Picture and tables of online softmax: the states that a run went through."""

import math

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, line, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import digits

WIDTH = 400
TOLERANCE = 1e-12


def recorded_steps() -> list[dict]:
    """The states of the run; EvidenceError unless they are softmax of what was seen."""
    from .runs_softmax import SCORES, steps

    found = runs.remembered(steps, 1)[0]
    for number, step in enumerate(found):
        seen = [score for block in SCORES[: number + 1] for score in block]
        lse = math.log(sum(map(math.exp, seen)))
        right = [math.exp(score - lse) for score in seen]
        right += [0.0] * (len(step["weights"]) - len(seen))
        errors = [abs(a - b) for a, b in zip(step["weights"], right, strict=True)]
        if max(*errors, abs(step["lse"] - lse)) > TOLERANCE:
            raise EvidenceError(f"after block {number + 1}: {step}, not {right}")
    if len(found) != len(SCORES):
        raise EvidenceError(f"{len(found)} states for {len(SCORES)} blocks")
    return found


@FIGURES
def softmax_weights() -> str:
    """How much each key weighs after each block, a row of bars for each."""
    from .runs_softmax import SCORES

    found = recorded_steps()
    size = len(SCORES[0])
    left, gap, high = 12, 14, 74
    wide = (WIDTH - 2 * left - (len(SCORES) - 1) * gap) / (size * len(SCORES))
    parts, words = [], []
    for number, step in enumerate(found):
        floor = 54.0 + number * (high + 58) + high
        parts.append(
            text(left, floor - high - 18,
                 f"after block {number + 1}: lse {step['lse']:.2f}", "xt-label")
        )  # fmt: skip
        for key, weight in enumerate(step["weights"]):
            block = key // size
            x = left + key * wide + block * gap
            middle = x + wide / 2 - 2
            parts.append(line(x, floor, x + wide - 4, floor, "xt-axis"))
            if block > number:
                continue
            tall = high * weight
            parts += [
                rect(x, floor - tall, wide - 4, tall, block),
                text(middle, floor - tall - 4, f"{weight:.2f}", "xt-tick", "middle"),
                text(middle, floor + 15, f"{SCORES[block][key % size]:g}",
                     "xt-tick", "middle"),
            ]  # fmt: skip
        words.append(", ".join(f"{weight:.3f}" for weight in step["weights"]))
    title = "Weights of nine keys after each of three blocks"
    height = int(54 + len(found) * (high + 58) - 30)
    return fit(document(WIDTH, height, parts, title, "; ".join(words)), WIDTH)


@TABLES
def softmax_steps() -> Table:
    """What was merged in each step, and by which factors."""
    from .runs_softmax import SCORES

    rows = []
    for number, step in enumerate(recorded_steps()):
        before = step["before"]
        shrink = 0.0 if before is None else math.exp(before - step["lse"])
        share = math.exp(step["block"] - step["lse"])
        rows.append([
            str(number + 1),
            ", ".join(f"{score:g}" for score in SCORES[number]),
            "nothing" if before is None else f"{before:.3f}",
            f"{step['block']:.3f}", f"{step['lse']:.3f}",
            "" if before is None else f"{shrink:.3f}", f"{share:.3f}",
        ])  # fmt: skip
    header = ["block", "scores", "lse before", "lse of the block", "lse after",
              "factor of the output", "factor of the block"]  # fmt: skip
    return Table(header, rows, "rlrrrrr")


@TABLES
def softmax_hidden_rows() -> Table:
    """Rows that see little: ours, softmax, and two ways to begin that fail."""
    from .runs_softmax import rows_that_see_little

    found = runs.remembered(rows_that_see_little, 1)[0]
    rows = []
    for name, (ours, whole, from_inf, from_low, lse) in found.items():
        if ours is None or abs(ours - (whole or 0.0)) > 1e-9:
            raise EvidenceError(f"{name}: {ours}, softmax {whole}")
        cells = [_or_nan(x) for x in (ours, whole, from_inf, from_low)]
        rows.append([name, *cells, "-inf" if lse is None else digits(lse, 6)])
    header = ["row", "ours", "torch's softmax", "maximum begun at -inf",
              "maximum begun at -10 000", "our lse"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


def _or_nan(number: float | None) -> str:
    return "**NaN**" if number is None else f"{number:.4f}"


@TABLES
def ring_softmax_seen(ranks: int = 4) -> Table:
    """Whose keys each rank has merged, hop by hop; all of them at the end."""
    from .runs_softmax import owners_seen

    found = runs.remembered(owners_seen, ranks)
    for rank, seen in enumerate(found):
        for hop, owners in enumerate(seen):
            if owners != sorted((rank - i) % ranks for i in range(hop + 1)):
                raise EvidenceError(f"rank {rank}, hop {hop}: {owners}")
    rows = [
        [str(hop), *(" ".join(map(str, seen[hop])) for seen in found)]
        for hop in range(ranks)
    ]
    return Table(
        ["hops", *(f"rank {r}" for r in range(ranks))], rows, "r" + "l" * ranks
    )


@TABLES
def ring_softmax_bytes() -> Table:
    """Messages and bytes of a rank, counted, on 2, 3 and 4 ranks."""
    from .runs_softmax import FEATURES, ROWS, ring_counted

    rows = []
    for ranks in (2, 3, 4):
        found = runs.remembered(ring_counted, ranks)
        formula = (ranks - 1) * ROWS * (FEATURES + 1) * runs.ITEMSIZE
        for rank, of_rank in enumerate(found):
            if (of_rank["messages"], of_rank["bytes"]) != (ranks - 1, formula):
                raise EvidenceError(f"rank {rank} of {ranks}: {of_rank}, {formula}")
            if max(of_rank["error"], of_rank["lse error"]) > 1e-5:
                raise EvidenceError(f"rank {rank} of {ranks}: {of_rank}")
        rows.append([str(ranks), str(ranks - 1), count(formula),
                     f"{max(f['error'] for f in found):.0e}"])  # fmt: skip
    header = ["ranks", "messages of a rank", "bytes of a rank",
              "furthest from one process in float64"]  # fmt: skip
    return Table(header, rows, "rrrr")
