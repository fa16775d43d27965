"""Lecture 5's first page: all schedules side by side."""

from xtrain.schedules import SCHEDULES, render_svg

from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table
from .common import HEADING, TITLES, played

STAGE_PIXELS = 27.0
"""How long F of a whole rank's part is drawn."""
COMPARED = (  # name, its page, micro-batches on 8 ranks, when it is the one to take
    ("gpipe", "gpipe", 24, "memory for all micro-batches, or recomputation"),
    ("one_f_one_b", "one-f-one-b", 24, "the default"),
    ("interleaved", "interleaved", 24, "few micro-batches, fast links"),
    ("zb_h1", "zero-bubble", 24, "a first rank as in 1F1B, backward can be split"),
    ("zb_h2", "zero-bubble", 24, "memory to spare"),
    ("zb_v", "zb-v", 24, "even memory, two stages a rank"),
    ("chimera", "chimera", 8, "few micro-batches, memory for a second copy"),
    ("dualpipe_simple", "dualpipe", 24, "to read before DualPipe"),
    ("dualpipe", "dualpipe", 24, "experts' exchange to hide"),
    ("dualpipe_v", "dualpipe-v", 24, "the same with one copy of the weights"),
)


@FIGURES
def schedules_at_one_scale(ranks: int = 4, micro_batches: int = 8) -> str:
    """All schedules of one model and one batch, one above the other.

    F = B = W = 1 of a rank's whole part: with several chunks a stage is shorter.
    """
    parts = []
    for name, title in TITLES.items():
        part = 1.0 / SCHEDULES[name](ranks, micro_batches).chunks
        times = dict.fromkeys(("forward", "backward_input", "backward_weight"), part)
        timeline = played(name, ranks, micro_batches, **times)
        words = f"{title}: {timeline.makespan:g}"
        drawing = render_svg(timeline, words, scale=STAGE_PIXELS)
        parts.append(f'<p style="{HEADING}">{words}</p>{drawing}')
    return "".join(parts)


@TABLES
def schedules_compared() -> Table:
    """All schedules at one size, as played; F = B = W."""
    rows = []
    for name, page, m, when in COMPARED:
        timeline = played(name, 8, m)
        rows.append(
            [f"[{name}]({page}.md)", str(m), f"{100 * timeline.idle_fraction:.1f} %",
             f"{timeline.makespan / timeline.work:.3f}",
             f"{max(timeline.peak_activations):g}",
             f"{max(timeline.peak_until_weights):g}",
             str(timeline.parameter_copies), when]
        )  # fmt: skip
    header = ["schedule", "micro-batches", "idle", "step / work",
              "activations until B", "until W", "copies of weights",
              "take it for"]  # fmt: skip
    return Table(header, rows, "lrrrrrrl")
