"""Curves of balancing, the map of a batch, and tables of losses and capacity."""

from typing import Any

from xtrain.plan import expert_capacity

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, document, fit, line_chart, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, percent, times, value

WIDTH = 400
NAMES = {"none": "no balancing", "loss": "auxiliary loss", "bias": "balance bias"}
FACTORS = [1.0, 1.25, 1.5, 2.0, 4.0]


def told(way: str, top_k: int = 1, seed: int | None = None) -> dict[str, Any]:
    """Loads and losses of the run, which has to have routed every copy."""
    from .runs_training import SEED, TOKENS, training

    chosen = SEED if seed is None else seed
    found = runs.remembered(training, 1, way, top_k, chosen)[0]
    for step, loads in enumerate(found["loads"]):
        if sum(loads) != TOKENS * top_k:
            raise EvidenceError(f"{way}, step {step}: {sum(loads)} copies in {loads}")
    return found


def over_mean(loads: list[int]) -> float:
    """The busiest expert's load over the mean of all."""
    return max(loads) * len(loads) / sum(loads)


def late(way: str, top_k: int = 1, seed: int | None = None) -> float:
    """Busiest over mean, averaged over the last ten steps."""
    loads = told(way, top_k, seed)["loads"][-10:]
    return sum(map(over_mean, loads)) / len(loads)


@FIGURES
def busiest_expert(top_k: int = 1) -> str:
    """Load of the busiest expert over the mean, by step, for each way to balance."""
    lines = {
        name: [
            (float(step), over_mean(loads))
            for step, loads in enumerate(told(way, top_k)["loads"])
        ]
        for way, name in NAMES.items()
    }
    return line_chart(
        lines,
        Axis("step"),
        Axis("busiest expert over mean", low=0.0, format=lambda r: f"{r:g}x"),
        "Load of the busiest expert",
        f"Top {top_k} of {len(told('none', top_k)['loads'][0])} experts",
    )


@FIGURES
def expert_loads(top_k: int = 1, every: int = 8) -> str:
    """Share of each expert by step: a band of cells for each way to balance."""
    left, high, top = 66.0, 15.0, 0.0
    parts: list[str] = []
    words = []
    for way, name in NAMES.items():
        loads = told(way, top_k)["loads"][::every]
        experts, total = len(loads[0]), sum(loads[0])
        wide = (WIDTH - left - 6) / len(loads)
        parts.append(text(4, top + 16, name, "xt-label"))
        top += 24
        for expert in range(experts):
            y = top + high * expert
            parts.append(text(left - 8, y + 11, f"expert {expert}", "xt-tick", "end"))
            for column, row in enumerate(loads):
                share = row[expert] / total
                hover = f"step {column * every}, expert {expert}: {share:.0%}"
                opacity = min(1.0, 0.06 + 0.94 * share / (3 / experts))
                parts.append(rect(left + wide * column, y, wide - 1, high - 1, expert,
                                  opacity=opacity, hover=hover))  # fmt: skip
        top += high * experts + 14
        words.append(f"{name}: at the end {loads[-1]}")
    last = (len(told("none", top_k)["loads"]) - 1) // every * every
    parts.append(text(left, top + 6, "step 0", "xt-tick"))
    parts.append(text(WIDTH - 6, top + 6, f"step {last}", "xt-tick", "end"))
    title = "Share of each expert by step"
    return fit(document(WIDTH, int(top + 12), parts, title, "; ".join(words)), WIDTH)


@FIGURES
def routing_map(ways: str = "bias", top_k: int = 2, tokens: int = 26) -> str:
    """Which experts the tokens of a batch go to, with which gates: trained layers.

    Args:
        ways: one of the runs, or several joined by "+".
    """
    from .runs_training import EXPERTS
    from .runs_training import routing_map as gates_of

    left, side = 66.0, 11.3
    parts: list[str] = []
    words, y = [], 4.0
    several = ways.split("+")
    for way in several:
        gates_TE = runs.remembered(gates_of, 1, way, top_k, tokens)[0]
        check_gates(gates_TE, top_k)
        if len(several) > 1:
            parts.append(text(4, y + 12, NAMES[way], "xt-label"))
            y += 20
        parts.append(text(left, y + 10, "tokens", "xt-tick"))
        parts.append(text(WIDTH - 4, y + 10, "load", "xt-tick", "end"))
        y += 16
        loads = []
        for expert in range(EXPERTS):
            parts.append(text(left - 8, y + 10, f"expert {expert}", "xt-tick", "end"))
            for token, row in enumerate(gates_TE):
                gate, x = row[expert], left + side * token
                hover = f"token {token}, expert {expert}: gate {gate:.2f}"
                opacity = 0.3 + 0.7 * gate if gate else 0.06
                parts.append(rect(x, y, side - 1.3, 11, expert if gate else 7,
                                  opacity=opacity, hover=hover))  # fmt: skip
            loads.append(sum(row[expert] > 0 for row in gates_TE))
            parts.append(text(WIDTH - 4, y + 10, str(loads[-1]), "xt-tick", "end"))
            y += 14
        y += 10
        words.append(f"{NAMES[way]}: loads {loads}")
    title = f"{tokens} tokens and the experts they go to"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def check_gates(gates_TE: list[list[float]], top_k: int) -> None:
    """EvidenceError unless each token has k gates, which add up to 1 if k > 1."""
    for token, row in enumerate(gates_TE):
        chosen = [gate for gate in row if gate]
        if len(chosen) != top_k or (top_k > 1 and abs(sum(chosen) - 1) > 1e-5):
            raise EvidenceError(f"token {token}: gates {chosen}")


@TABLES
def balance_by_way(top_k: int = 1) -> Table:
    """Loads of the experts and loss at the end of the run, for each way."""
    from .runs_training import EXPERTS, TOKENS

    few = TOKENS * top_k / EXPERTS / 10
    rows = []
    for way, name in NAMES.items():
        found = told(way, top_k)
        last = found["loads"][-1]
        rows.append([
            name, ",\u00a0".join(map(str, sorted(last, reverse=True))),
            times(late(way, top_k)), str(sum(load < few for load in last)),
            number(sum(found["losses"][-10:]) / 10),
        ])  # fmt: skip
    header = ["", "loads of the last step", "busiest over mean", "idle experts",
              "loss"]  # fmt: skip
    return Table(header, rows, "llrrr")


@TABLES
def collapse_by_seed(seeds: tuple[int, ...] = (0, 1, 2, 3)) -> Table:
    """Busiest over mean at the end, for other seeds and for one or two experts."""
    rows = []
    for top_k in (1, 2):
        for way, name in NAMES.items():
            found = [late(way, top_k, seed) for seed in seeds]
            first = str(top_k) if way == "none" else ""
            rows.append([first, name, *(times(ratio) for ratio in found)])
    header = ["k", "", *(f"seed {seed}" for seed in seeds)]
    return Table(header, rows, "rl" + "r" * len(seeds))


@TABLES
def capacity_drops(top_k: int = 1) -> Table:
    """Slots and dropped copies by capacity factor, before and after balancing."""
    from .runs_training import EXPERTS, TOKENS, dropped_copies

    found = {
        way: runs.remembered(dropped_copies, 1, way, top_k, FACTORS)[0]
        for way in ("none", "bias")
    }
    rows = []
    for index, factor in enumerate(FACTORS):
        slots = expert_capacity(TOKENS, EXPERTS, top_k, factor)
        shares = [found[way][index] / (TOKENS * top_k) for way in ("none", "bias")]
        unused = 1 - (1 - shares[1]) * TOKENS * top_k / (slots * EXPERTS)
        rows.append([f"{factor:g}", str(slots), *map(percent, shares),
                     percent(unused)])  # fmt: skip
    header = ["capacity factor", "slots of an expert", "dropped, no balancing",
              "dropped, balance bias", "empty slots then"]  # fmt: skip
    return Table(header, rows, "rrrrr")


@value
def busiest_over_mean(way: str, top_k: int = 1) -> float:
    """Of the recorded run: load of the busiest expert over the mean, at its end."""
    return late(way, top_k)
