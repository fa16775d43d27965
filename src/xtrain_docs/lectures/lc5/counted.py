"""Tables of the lc5 pages: what is counted in schedules, rank by rank."""

from xtrain.schedules import with_messages

from ...tables import REGISTRY, Table
from .figures import TITLES, played
from .published import agree


@REGISTRY
def schedule_activations(
    names: str = "gpipe one_f_one_b", ranks: int = 4, micro_batches: int = 8
) -> Table:
    """Most micro-batches that each rank holds at a time, and the sum over the ranks."""
    rows = []
    for name in names.split():
        peaks = played(name, ranks, micro_batches).peak_activations
        sums = {
            "gpipe": micro_batches * ranks,
            "one_f_one_b": ranks * (ranks + 1) / 2,
            "zb_h1": ranks * (ranks + 1) / 2,
            "zb_h2": ranks**2,
            "zb_v": ranks**2,
        }
        if name in sums:
            agree(f"{name}, all ranks", sum(peaks), sums[name])
        rows.append([TITLES[name], *(f"{p:g}" for p in peaks), f"{sum(peaks):g}"])
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
