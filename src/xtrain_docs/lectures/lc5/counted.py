"""Tables of the lc5 pages: what is counted in schedules, rank by rank."""

from xtrain.schedules import with_messages

from ...tables import REGISTRY, Table
from .figures import TITLES, played
from .published import agree


@REGISTRY
def schedule_activations(
    names: str = "gpipe one_f_one_b", ranks: int = 4, micro_batches: int = 8
) -> Table:
    """Most micro-batches that each rank holds at a time, and the sum over the ranks.

    Counted until B, and where W is later and that makes a difference, until W too.
    """
    rows = []
    for name in names.split():
        timeline = played(name, ranks, micro_batches)
        peaks, until_w = timeline.peak_activations, timeline.peak_until_weights
        sums = {
            "gpipe": micro_batches * ranks,
            "one_f_one_b": ranks * (ranks + 1) / 2,
            "zb_h1": ranks * (ranks + 1) / 2,
            "zb_h2": ranks**2,
            "zb_v": ranks**2,
        }
        if name in sums:
            agree(f"{name}, all ranks", sum(peaks), sums[name])
        counts = {TITLES[name]: peaks}
        if until_w != peaks:
            counts = {f"{TITLES[name]}, until B": peaks, "the same until W": until_w}
            agree(f"{name}, until W", sum(until_w), ranks * max(peaks))
        for title, held in counts.items():
            rows.append([title, *(f"{p:g}" for p in held), f"{sum(held):g}"])
    header = ["schedule", *(f"rank {r}" for r in range(ranks)), "together"]
    return Table(header, rows, "l" + "r" * (ranks + 1))


@REGISTRY
def messages_by_schedule(ranks: int = 4, micro_batches: int = 8) -> Table:
    """Messages of one micro-batch, forward and backward, and stages on a rank."""
    rows = []
    for name, title in TITLES.items():
        order = with_messages(played(name, ranks, micro_batches).schedule)
        sent = sum(
            action.kind.startswith("SEND") for row in order.actions for action in row
        )
        stages, turns = order.stages, order.placement == "v"
        agree(name, sent / micro_batches, 2 * (stages - 1 - turns))
        rows.append(
            [title, str(stages), str(len(order.stages_of(0))),
             f"{sent / micro_batches:g}"]
        )  # fmt: skip
    header = ["schedule", "virtual stages", "on a rank", "messages a micro-batch"]
    return Table(header, rows, "lrrr")
