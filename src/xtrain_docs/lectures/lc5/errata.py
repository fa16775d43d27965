"""Tables of the errata of lc5: what the notes draw and say, beside what is played."""

from xtrain.plan import pipeline_idle
from xtrain.schedules import SCHEDULES, simulate

from ...tables import REGISTRY, Table
from ...values import percent
from .figures import TITLES, played
from .published import agree


@REGISTRY
def idle_of_zero_bubble(ranks: tuple[int, ...] = (4, 8)) -> Table:
    """Idle time, step and memory of 1F1B and of both handmade zero-bubble schedules."""
    rows = []
    for p in ranks:
        for name in ("one_f_one_b", "zb_h1", "zb_h2"):
            timeline = played(name, p, 3 * p)
            agree(name, max(timeline.idle), pipeline_idle(name, p))
            longer = timeline.makespan - timeline.work
            agree(f"{name}, step", longer, beyond_work(name, p, 1, 1, 1))
            rows.append(
                [str(p), TITLES[name], f"{max(timeline.idle):g}",
                 f"{timeline.makespan:g}", f"{timeline.makespan / timeline.work:.3f}",
                 f"{max(timeline.peak_activations):g}",
                 f"{max(timeline.peak_until_weights):g}"]
            )  # fmt: skip
    header = ["ranks", "schedule", "idle", "step", "step / work",
              "activations until B", "until W"]  # fmt: skip
    return Table(header, rows, "rlrrrrr")


def beyond_work(name: str, ranks: int, f: float, b: float, w: float) -> float:
    """How much longer one step is, first start to last end, than a rank's work."""
    longest = {
        "one_f_one_b": f + b + w,
        "zb_h1": max(f + b - w, f, b),
        "zb_h2": max(f + b - 2 * w, b - f, f),
    }
    return (ranks - 1) * longest[name]


CONVENTIONS = (  # schedule, in these pages, in the report, which writes B for B + W
    ("one_f_one_b", "$(P-1)(F+B+W)$", "$(P-1)(F+B)$"),
    ("zb_h1", "$(P-1)(F+B-W)$", "$(P-1)(F+B-2W)$"),
    ("dualpipe", r"$(\frac{P}{2}-1)(F\&B+B-2W)$", r"$(\frac{P}{2}-1)(F\&B+B-3W)$"),
)


def as_reported(name: str, ranks: int, f: float, b: float, w: float) -> float:
    """The idle time by the DualPipe report's table; `b` is the whole backward."""
    if name == "dualpipe":
        return (ranks / 2 - 1) * ((f + b) + b - 3 * w)
    return (ranks - 1) * (f + b - (2 * w if name == "zb_h1" else 0))


@REGISTRY
def two_conventions(ranks: int = 8, micro_batches: int = 20) -> Table:
    """The same idle time by both ways to write B, and as played."""
    rows = []
    for name, ours, theirs in CONVENTIONS:
        timeline = played(name, ranks, micro_batches)
        agree(name, max(timeline.idle), pipeline_idle(name, ranks))
        agree(name, max(timeline.idle), as_reported(name, ranks, 1, 2, 1))
        rows.append(
            [TITLES[name], ours, theirs, f"{max(timeline.idle):g}",
             f"{max(timeline.peak_activations):g}", str(timeline.parameter_copies)]
        )  # fmt: skip
    header = ["schedule", "B of the input only", "B of all, as in the report", "idle",
              "activations", "copies"]  # fmt: skip
    return Table(header, rows, "lllrrr")


def waited(name: str, ranks: int, micro_batches: int, exchange: float) -> float:
    """How much longer rank 0 is busy because of the experts' exchanges."""
    schedule = SCHEDULES[name](ranks, micro_batches)
    with_them = simulate(schedule, all_to_all=exchange)
    return with_them.works[0] - simulate(schedule).works[0]


def exposed(ranks: int, micro_batches: int, exchange: float) -> tuple[float, float]:
    """What one pair of DualPipe waits, and all of rank 0, by the rule."""
    actions = SCHEDULES["dualpipe"](ranks, micro_batches).actions[0]
    pairs = sum(action.under is not None for action in actions)
    each = max(0.0, 2 * exchange - 3)
    return each, pairs * each + (micro_batches - pairs) * 2 * exchange


@REGISTRY
def exchanges_hidden(ranks: int = 8, micro_batches: int = 20, more: int = 80) -> Table:
    """What is left to see of the experts' exchanges, by their length."""
    rows = []
    for exchange in (0.5, 1.0, 1.5, 2.0, 3.0):
        hidden = []
        for m in (micro_batches, more):
            total = 2 * exchange * m
            found = waited("dualpipe", ranks, m, exchange)
            agree("1F1B", waited("one_f_one_b", ranks, m, exchange), total)
            agree("dualpipe", found, exposed(ranks, m, exchange)[1])
            hidden.append(percent(1 - found / total))
        each, found = exposed(ranks, micro_batches, exchange)
        rows.append([f"{exchange:g}", f"{2 * exchange * micro_batches:g}",
                     f"{each:g}", f"{found:g}", *hidden])  # fmt: skip
    header = ["exchange", "1F1B", "one pair", "DualPipe", "hidden",
              f"hidden, m = {more}"]  # fmt: skip
    return Table(header, rows, "r" * len(header))
