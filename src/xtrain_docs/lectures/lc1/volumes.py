"""Charts of the lc1 pages on what all-reduces send: bytes, messages, rounds."""

from xtrain.plan import all_reduce_lower_bound, collective_cost, collective_traffic

from ...evidence import WORLD_SIZES
from ...figures import REGISTRY
from ...svg import Axis, line_chart
from .figures import ALL_REDUCES


@REGISTRY
def volume_by_ranks(most: int = 64) -> str:
    """How many times the tensor the busiest rank of each all-reduce sends."""
    counts = [2**i for i in range(1, most.bit_length())]
    names = ("ring_all_reduce", "tree_all_reduce", "parameter_server_all_reduce")
    lines = {
        name.removesuffix("_all_reduce").replace("_", " "): [
            (p, _busiest(name, p)) for p in counts
        ]
        for name in names
    }
    lines["lower bound"] = [(p, float(all_reduce_lower_bound(p))) for p in counts]
    lines = {name: lines[name] for name in
             ("parameter server", "tree", "lower bound", "ring")}  # fmt: skip
    return line_chart(
        lines,
        Axis("ranks", "log2", lambda p: f"{p:g}"),
        Axis(
            "bytes sent by the busiest rank (M: the tensor)",
            "log2",
            lambda v: f"{v:g} M",
        ),
        "Bytes that the busiest rank of an all-reduce sends",
    )


def _busiest(name: str, ranks: int) -> float:
    numel = 64 * ranks
    return collective_traffic(name, numel, ranks).max_sent / numel


@REGISTRY
def algorithm_coefficients(ranks: int = 8) -> str:
    """Messages against volume: every all-reduce as one point of a chart."""
    points = {
        name.replace("_", "-"): [
            (
                float(collective_cost(f"{name}_all_reduce", ranks).messages),
                float(collective_cost(f"{name}_all_reduce", ranks).volume),
            )
        ]
        for name in (*ALL_REDUCES, "parameter_server")
    }
    drawing = line_chart(
        points,
        Axis("messages one after another", "linear", lambda n: f"{n:g}"),
        Axis("bytes (M: the tensor)", "linear", lambda n: f"{n:g} M"),
        f"The price list of {ranks} ranks: messages and bytes",
    )
    return drawing.replace('r="3"', 'r="7"')


@REGISTRY
def ring_order_rounds() -> str:
    """Rounds of a ring's N-1 steps for three orders of send and receive, measured."""
    from .tables import ORDERS, order_rounds

    lines = {
        order: [(float(n), float(order_rounds(order, n))) for n in WORLD_SIZES]
        for order in ORDERS
    }
    return line_chart(
        lines,
        Axis("ranks", "linear", lambda n: f"{n:g}", low=2, high=8, ticks=[2, 3, 4, 8]),
        Axis("rounds", "linear", lambda n: f"{n:g}"),
        "Rounds that the N-1 steps of a ring take",
    )
