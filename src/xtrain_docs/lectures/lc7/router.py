"""The table of gates and their gradients on the page of the router."""

import math

from ... import runs
from ...evidence import EvidenceError
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value

TOLERANCE = 1e-12


@value
def combinations(experts: int, chosen: int) -> int:
    """In how many ways a token can choose its experts."""
    return math.comb(experts, chosen)


def first_gate(kind: tuple[str, bool], logits: list[float], chosen: list[int]) -> float:
    """The gate of the first chosen expert, written out."""
    score, renormalize = kind
    if score == "softmax":
        total = sum(map(math.exp, logits))
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    among = sum(scores[expert] for expert in chosen) if renormalize else 1.0
    return scores[chosen[0]] / among


def check_gate(kind: tuple[str, bool], found: dict[str, list[float]]) -> None:
    """EvidenceError unless gates and gradient are those of the formula."""
    from .runs_router import LOGITS, TOP_K

    logits, step = list(LOGITS), 1e-5
    chosen = sorted(range(len(logits)), key=lambda e: -logits[e])[:TOP_K]
    right = []
    for expert in range(len(logits)):
        moved = [
            [z + sign * step * (e == expert) for e, z in enumerate(logits)]
            for sign in (1, -1)
        ]
        up, down = (first_gate(kind, one, chosen) for one in moved)
        right.append((up - down) / (2 * step))
    pairs = zip(found["gradient"], right, strict=True)
    gate = first_gate(kind, logits, chosen)
    if found["experts"] != chosen or abs(found["gates"][0] - gate) > TOLERANCE:
        raise EvidenceError(f"{kind}: {found}, not {gate} of {chosen}")
    if max(abs(ours - theirs) for ours, theirs in pairs) > 1e-9:
        raise EvidenceError(f"{kind}: gradient {found['gradient']}, not {right}")


@TABLES
def gate_gradients() -> Table:
    """Gates of one token, and what its first gate gives each logit in backward."""
    from .runs_router import KINDS, LOGITS, gates_and_gradients

    rows = []
    every = runs.remembered(gates_and_gradients, 1)[0]
    for kind, found in zip(KINDS, every, strict=True):
        check_gate(kind, found)
        score, renormalize = kind
        rows.append([
            f"{score}, renormalised" if renormalize else score,
            ", ".join(f"{gate:.3f}" for gate in found["gates"]),
            f"{sum(found['gates']):.3f}",
            *(f"{slope:.3f}" if abs(slope) > TOLERANCE else "0"
              for slope in found["gradient"]),
        ])  # fmt: skip
    header = ["", "gates", "their sum", *(f"logit {z:g}" for z in LOGITS)]
    return Table(header, rows, "llr" + "r" * len(LOGITS))
