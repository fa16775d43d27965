"""Tables of the errata of lc5: what the notes draw and say, beside what is played."""

from xtrain.plan import pipeline_idle
from xtrain.schedules import SCHEDULES, gpipe, simulate

from ...evidence import EvidenceError
from ...tables import REGISTRY, Table
from ...values import percent
from .figures import TITLES, played
from .published import agree

NOTES = {"F": (0, 1, 1, 2), "B": (3, 2, 2, 3)}
"""The slots in which the notes draw forward and backward of stages 0 to 3."""


def needs(kind: str, stage: int, stages: int) -> tuple[str, int] | None:
    """The forward or backward that has to be done first; one micro-batch."""
    if kind == "F":
        return ("F", stage - 1) if stage else None
    return ("B", stage + 1) if stage < stages - 1 else ("F", stage)


def violations(slots: dict[str, tuple[int, ...]]) -> list[str]:
    """Actions that are not in a later slot than what they need."""
    problems = []
    for kind, row in slots.items():
        for stage, slot in enumerate(row):
            first = needs(kind, stage, len(row))
            if first is not None and slots[first[0]][first[1]] >= slot:
                problems.append(f"{stage}{kind}0 needs {first[1]}{first[0]}0")
    return problems


def staircase(ranks: int) -> dict[str, tuple[int, ...]]:
    """The slots of one micro-batch as it is played, a backward as long as a forward."""
    timeline = simulate(gpipe(ranks, 1), 1.0, 0.5, 0.5)
    slots = zip(*([int(s) for s in row] for row in timeline.starts), strict=True)
    return dict(zip("FB", slots, strict=True))


@REGISTRY
def notes_staircase() -> Table:
    """One micro-batch on 4 stages: the notes' slots, and those that are played."""
    right = staircase(4)
    if violations(right):
        raise EvidenceError(f"the played order is wrong: {violations(right)}")
    rows = []
    wrong = {words.split(" ")[0]: words for words in violations(NOTES)}
    for kind, row in NOTES.items():
        for stage, slot in enumerate(row):
            word = f"{stage}{kind}0"
            why = wrong.get(word, "").removeprefix(f"{word} needs ")
            verdict = f"needs `{why}`, which is not done" if why else ""
            rows.append([f"`{word}`", str(slot), verdict, str(right[kind][stage])])
    return Table(["action", "slot in the notes", "", "slot as played"], rows, "lrlr")


@REGISTRY
def same_bubble(
    names: str = "gpipe one_f_one_b", ranks: int = 4, micro_batches: int = 8
) -> Table:
    """Length of the step, idle time and memory of schedules at one size."""
    rows = []
    for name in names.split():
        timeline = played(name, ranks, micro_batches)
        agree(name, max(timeline.idle), pipeline_idle(name, ranks))
        rows.append(
            [TITLES[name], f"{timeline.makespan:g}", f"{max(timeline.idle):g}",
             f"{max(timeline.peak_activations):g}"]
        )  # fmt: skip
    return Table(["schedule", "step", "idle", "activations"], rows, "lrrr")


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
