"""Tables of the lc5 pages: closed forms beside what the simulator gives."""

from xtrain.plan import pipeline_activations, pipeline_idle
from xtrain.schedules import SCHEDULES, with_messages

from ...evidence import EvidenceError
from ...tables import REGISTRY, Table
from ...values import value
from .figures import played

COMPARED = (  # name, ranks, micro-batches, chunks, when it is the one to take
    ("gpipe", 8, 24, None, "memory for all micro-batches, or recomputation"),
    ("one_f_one_b", 8, 24, None, "the default"),
    ("interleaved", 8, 24, 2, "few micro-batches, fast links"),
    ("zb_h1", 8, 24, None, "a first rank as in 1F1B, backward can be split"),
    ("zb_h2", 8, 24, None, "memory to spare"),
    ("zb_v", 8, 24, None, "even memory, two stages a rank"),
    ("chimera", 8, 8, None, "few micro-batches, memory for a second copy"),
    ("dualpipe_simple", 8, 24, None, "to read before DualPipe"),
    ("dualpipe", 8, 24, None, "experts' exchange to hide"),
    ("dualpipe_v", 8, 24, None, "the same with one copy of the weights"),
)
FORMS = {
    "gpipe": "$(p-1)(F+B+W)$",
    "one_f_one_b": "$(p-1)(F+B+W)$",
    "interleaved": "$(p-1)(F+B+W)$ of a chunk",
    "zb_h1": "$(p-1)(F+B-W)$",
    "zb_h2": "$(p-1)(F+B-2W)$",
    "zb_v": "$0$",
    "chimera": "$(p-2)(B+W)$",
    "dualpipe": r"$(\frac{p}{2}-1)(F\&B+B-2W)$",
    "dualpipe_v": r"$(p-1)(F\&B+B-2W)$",
}


@value
def step_of(name: str, ranks: int, micro_batches: int, exchange: float = 0.0) -> float:
    """The length of one step as played, F = B = W = 1."""
    return played(name, ranks, micro_batches, all_to_all=exchange).makespan


@value
def idle_of(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """The longest idle time, F = B = W = 1 of a rank's whole part."""
    parts = None if chunks == 1 else chunks
    return max(played(name, ranks, micro_batches, parts).idle) / chunks


@value
def held_by(
    name: str,
    ranks: int,
    micro_batches: int,
    rank: int,
    until: str = "B",
    chunks: int = 1,
) -> float:
    """Micro-batches that a rank holds at most, from their forward to B or to W."""
    timeline = played(name, ranks, micro_batches, None if chunks == 1 else chunks)
    peaks = {"B": timeline.peak_activations, "W": timeline.peak_until_weights}
    return peaks[until][rank]


@value
def messages_of(ranks: int, micro_batches: int, chunks: int) -> float:
    """Of one micro-batch in interleaved 1F1B, counted in the lists of its messages."""
    order = with_messages(SCHEDULES["interleaved"](ranks, micro_batches, chunks=chunks))
    sent = sum(a.kind.startswith("SEND") for row in order.actions for a in row)
    return sent / micro_batches


@value
def versions_kept(ranks: int, micro_batches: int, rank: int) -> int:
    """Versions of its weights that a rank of 1F1B keeps, stepping after a backward."""
    return steps_between(ranks, micro_batches)[rank] + 1


def steps_between(ranks: int, micro_batches: int) -> list[int]:
    """Per rank of 1F1B: most backwards between a forward and its own backward."""
    most = []
    for actions in SCHEDULES["one_f_one_b"](ranks, micro_batches).actions:
        at = {(a.kind, a.micro_batch): i for i, a in enumerate(actions)}
        kinds = [a.kind for a in actions]
        most.append(max(
            kinds[at["F", i] : at["BW", i]].count("BW") for i in range(micro_batches)
        ))  # fmt: skip
    return most


def page(name: str) -> str:
    """The page of a schedule: both handmade zero-bubble schedules share one."""
    shared = {"zb_h1": "zero-bubble", "zb_h2": "zero-bubble"}
    shared["dualpipe_simple"] = "dualpipe"
    return f"[{name}]({shared.get(name, name.replace('_', '-'))}.md)"


@REGISTRY
def schedules_compared() -> Table:
    """All schedules at one size, as played; F = B = W."""
    rows = []
    for name, ranks, m, chunks, when in COMPARED:
        timeline = played(name, ranks, m, chunks)
        rows.append(
            [page(name), str(m), f"{100 * timeline.idle_fraction:.1f} %",
             f"{timeline.makespan / timeline.work:.3f}",
             f"{max(timeline.peak_activations):g}",
             f"{max(timeline.peak_until_weights):g}",
             str(timeline.parameter_copies), when]
        )  # fmt: skip
    header = ["schedule", "micro-batches", "idle", "step / work",
              "activations until B", "until W", "copies of weights",
              "take it for"]  # fmt: skip
    return Table(header, rows, "lrrrrrrl")


@REGISTRY
def schedule_form(
    name: str, ranks: tuple[int, ...] = (2, 4, 8), chunks: int | None = None
) -> Table:
    """Idle time and activations by the closed form, each equal to what was played."""
    rows = []
    for p in ranks:
        m = p if name == "chimera" else 4 * p
        timeline = played(name, p, m, chunks)
        idle, held = max(timeline.idle), max(timeline.peak_activations)
        forms = (
            pipeline_idle(name, p),
            pipeline_activations(name, p, m, timeline.schedule.chunks),
        )
        if abs(idle - forms[0]) > 1e-9 or abs(held - forms[1]) > 1e-9:
            raise EvidenceError(f"{name} of {p} ranks: {idle}, {held}; forms {forms}")
        rows.append(
            [str(p), str(m), FORMS[name], f"{forms[0]:g}", f"{idle:g}",
             f"{100 * timeline.idle_fraction:.1f} %", f"{forms[1]:g}", f"{held:g}"]
        )  # fmt: skip
    header = ["ranks", "micro-batches", "idle, form", "is", "simulated", "of the step",
              "activations, form", "simulated"]  # fmt: skip
    return Table(header, rows, "rrlrrrrr")
