"""Tables of the lc5 pages: what papers publish of schedules, beside what is played."""

from xtrain.plan import pipeline_idle
from xtrain.schedules import SCHEDULES, Timeline, simulate
from xtrain.schedules.action import Action

from ...evidence import EvidenceError
from ...tables import REGISTRY, Table
from .figures import played

PUBLISHED = (  # micro-batches, F, B, W, p2p in ms, and the bubble rates
    (24, 18.522, 18.086, 9.337, 0.601, (0.2431, 0.1585, 0.1083)),
    (32, 18.513, 18.086, 9.331, 0.626, (0.1985, 0.1242, 0.0837)),
    (64, 18.546, 18.097, 9.321, 0.762, (0.1240, 0.0674, 0.0444)),
)
"""Of a model with 1.5 billion parameters on 8 ranks: Qi et al., 2024, table 5."""

TIMES = (
    (1, 1, 1, 3),
    (1, 1, 1, 2.5),
    (1, 1.3, 0.9, 3.2),
    (1, 1.2, 0.8, 3),
    (2, 1, 1, 4),
)
"""F, B, W and F&B: even ones first, to see where a closed form is exact."""


def cost(timeline: Timeline) -> float:
    """The longest time from a rank's first start to its last end."""
    rows = zip(timeline.starts, timeline.ends, strict=True)
    return max(ends[-1] - starts[0] for starts, ends in rows)


def agree(what: str, found: float, expected: float, within: float = 1e-9) -> None:
    """Stop the build if a run contradicts what is said of it."""
    if not abs(found - expected) <= within:
        raise EvidenceError(f"{what}: played {found}, said to be {expected}")


@REGISTRY
def published_bubbles() -> Table:
    """Bubble rates of the zero bubble paper beside those that are played here."""
    rows = []
    for m, f, b, w, c, rates in PUBLISHED:
        row = [str(m), *(f"{time:.3f}" for time in (f, b, w, c))]
        names = ("one_f_one_b", "zb_h1", "zb_h2")
        for name, published in zip(names, rates, strict=True):
            took = cost(simulate(SCHEDULES[name](8, m), f, b, w, p2p=c))
            rate = (took - m * (f + b + w)) / took
            agree(f"{name}, {m} micro-batches", rate, published, 6e-5)
            row.append(f"{published:.4f} / {rate:.4f}")
        rows.append(row)
    header = ["micro-batches", "F", "B", "W", "p2p", "1F1B", "ZB-H1", "ZB-H2"]
    return Table(header, rows, "rrrrrrrr")


@REGISTRY
def bubble_twice() -> Table:
    """One idle time, over the ideal time and over all time, of 1F1B."""
    rows = []
    for p, m in ((4, 1), (4, 4), (4, 8), (8, 8), (8, 24), (8, 64)):
        timeline = played("one_f_one_b", p, m)
        agree("over ideal", timeline.bubble_over_ideal, (p - 1) / m)
        agree("over all", timeline.idle_fraction, (p - 1) / (m + p - 1))
        rows.append(
            [str(p), str(m), f"{max(timeline.idle):g}", f"{timeline.work:g}",
             f"{timeline.bubble_over_ideal:.4f}", f"{timeline.idle_fraction:.4f}"]
        )  # fmt: skip
    header = ["ranks $p$", "micro-batches $m$", "idle", "work", "$(p-1)/m$",
              "$(p-1)/(m+p-1)$"]  # fmt: skip
    return Table(header, rows, "rrrrrr")


@REGISTRY
def idle_at_times(
    name: str, ranks: int = 8, micro_batches: int = 20, pairs: bool = True
) -> Table:
    """The closed form beside what is played, for even and for uneven times."""
    rows = []
    for f, b, w, pair in TIMES:
        if not pairs and abs(pair - (f + b + w)) > 1e-9:
            continue
        schedule = SCHEDULES[name](ranks, micro_batches)
        timeline = simulate(schedule, f, b, w, overlapped=pair)
        form = pipeline_idle(name, ranks, f, b, w, pair)
        if f == b == w and pair == f + b + w:
            agree(name, max(timeline.idle), form)
        shown = [f"{pair:g}"] if pairs else []
        rows.append(
            [f"{f:g}", f"{b:g}", f"{w:g}", *shown, f"{form:.3g}",
             f"{max(timeline.idle):.3g}"]
        )  # fmt: skip
    header = ["F", "B", "W", *(["F&B"] if pairs else []), "form", "simulated"]
    return Table(header, rows, "r" * len(header))


@REGISTRY
def dualpipe_steps(ranks: int = 8, micro_batches: int = 20) -> Table:
    """How often the ranks of one half do each of DualPipe's eight steps."""
    schedule, rows = SCHEDULES["dualpipe"](ranks, micro_batches), []
    for depth in range(ranks // 2):
        ahead = ranks // 2 - depth - 1
        main = micro_batches // 2 - ranks + depth + 1
        times = [2 * ahead, depth + 1, ahead, main, ahead, depth + 1, ahead, depth + 1]
        for rank in (depth, ranks - 1 - depth):
            count_actions(schedule.actions[rank], times, middle=ahead == 0)
        rows.append([f"{depth} and {ranks - 1 - depth}", *map(str, times)])
    return Table(["ranks", *(f"step {i}" for i in range(1, 9))], rows, "l" + "r" * 8)


def count_actions(actions: list[Action], times: list[int], middle: bool) -> None:
    """Stop the build unless a rank does as much as eight steps, so often, contain."""
    one, two, three, main, five, six, seven, eight = times
    expected = {
        "F": one + 2 * two + three + middle,
        "BW": five + six + middle,
        "B": three + six + seven,
        "W": three + seven + eight,
        "pair": 2 * main - middle + five,
    }
    kinds = ["pair" if a.under else a.kind for a in actions]
    for kind, count in expected.items():
        agree(f"{kind} in eight steps", kinds.count(kind), count)
