"""Figures of the lc1 pages, drawn from real runs and from the formulas."""

from collections.abc import Sequence
from math import prod

from xtrain.plan import (
    Link,
    all_reduce_lower_bound,
    collective_cost,
    collective_time,
    crossover,
    hierarchical_time,
    nccl_all_reduce_time,
)

from ... import runs, values
from ...evidence import WORLD_SIZES
from ...figures import REGISTRY
from ...svg import Axis, document, fit, line_chart, text

CELL, ROW, GAP = 36, 30, 40
ALL_REDUCES = ("ring", "halving_doubling", "tree", "one_shot")


# ------------------------------------------------ before and after a collective


def label(value: int, ranks: int) -> tuple[str, int]:
    """What a cell holds, as text and the number of its colour.

    A cell is a whole number with bit r * N + c set for "cell c of rank r"; the sum
    over all ranks has one bit of every rank. Raises ValueError for anything else.
    """
    bits = [i for i in range(ranks * ranks) if value >> i & 1]
    owners, places = {i // ranks for i in bits}, {i % ranks for i in bits}
    if not bits:
        return "", -1
    if len(places) > 1 or len(owners) != len(bits):
        raise ValueError(f"{value:b} mixes cells")
    place = places.pop()
    if len(bits) == 1:
        owner = owners.pop()
        return f"{'abcdefgh'[owner]}{place}", owner
    if len(bits) < ranks:
        raise ValueError(f"{value:b} is a sum of some ranks only")
    return f"\u03a3{place}", 7


def _cell(x: float, y: float, words: str, colour: int) -> list[str]:
    box = f'x="{x:g}" y="{y:g}" width="{CELL - 4}" height="{ROW - 4}" rx="5"'
    if colour < 0:
        return [f'<rect {box} class="xt-axis" fill="none" stroke-dasharray="2 4"/>']
    return [
        f'<rect {box} class="xt-bar-fill xt-s{colour}" fill-opacity="0.28"/>',
        text(x + (CELL - 4) / 2, y + 18, words, "xt-label", "middle"),
    ]


@REGISTRY
def before_after(name: str, ranks: int = 4, root: int = 0) -> str:
    """The cells of every rank before and after a collective, from a real run."""
    from .runs import cells_before_and_after

    found = runs.remembered(cells_before_and_after, ranks, name, root)
    left, top = 56, 30
    widest = [max(len(r[side]) for r in found) for side in (0, 1)]
    second = left + widest[0] * CELL + GAP
    width = int(second + max(widest[1], 2) * CELL + 6)
    parts = [
        text(left, 16, "before", "xt-tick"),
        text(second, 16, "after", "xt-tick"),
    ]
    for rank, sides in enumerate(found):
        y = top + rank * ROW
        parts.append(text(left - 8, y + 18, f"rank {rank}", "xt-tick", "end"))
        for start, cells in zip((left, second), sides, strict=True):
            for place, value in enumerate(cells):
                parts += _cell(start + place * CELL, y, *label(value, ranks))
    middle = top + ranks * ROW / 2 + 4
    parts.append(text(second - GAP / 2 - 2, middle, "\u2192", "xt-label", "middle"))
    title = f"{name} on {ranks} ranks, before and after"
    rows = "; ".join(
        f"rank {rank}: {_words(sides[0], ranks)} becomes {_words(sides[1], ranks)}"
        for rank, sides in enumerate(found)
    )
    return fit(document(width, top + ranks * ROW + 6, parts, title, rows), width)


def _words(cells: Sequence[int], ranks: int) -> str:
    return " ".join(label(value, ranks)[0] or "-" for value in cells)


# ------------------------------------------------------------------- meshes


@REGISTRY
def mesh_groups(shape: tuple[int, ...], axes: str, axis: str) -> str:
    """The ranks of a mesh in planes of its last two axes; one colour a group."""
    from xtrain.comm.mesh import axis_ranks, mesh_coordinates

    names = axes.split(",")
    at = names.index(axis)
    full = (1,) * (2 - len(shape)) + tuple(shape)
    rows, columns = full[-2:]
    planes = prod(full[:-2])
    groups = [tuple(axis_ranks(r, shape, at)) for r in range(prod(shape))]
    order = list(dict.fromkeys(groups))
    left, top = 10, 28
    parts = [text(left, 16, f"groups of {axis}", "xt-label")]
    for rank, group in enumerate(groups):
        plane, inside = divmod(rank, rows * columns)
        row, column = divmod(inside, columns)
        x = left + plane * (columns * CELL + 24) + column * CELL
        parts += _cell(x, top + row * ROW, str(rank), order.index(group) % 7)
    places = "; ".join(
        f"rank {r} at {mesh_coordinates(r, shape)}" for r in range(prod(shape))
    )
    width = max(300, left + planes * (columns * CELL + 24))
    title = f"{axis} groups of the mesh {shape}: {', '.join(map(str, order))}"
    width = int(width)
    return fit(document(width, top + rows * ROW + 6, parts, title, places), width)


# ---------------------------------------------------------- the alpha-beta model


def _sizes(first: int, last: int, per_octave: int = 1) -> list[float]:
    steps = range(first * per_octave, last * per_octave + 1)
    return [2 ** (step / per_octave) for step in steps]


@REGISTRY
def when_ring(ranks: int = 8, alpha: float = 5e-6, bandwidth: float = 50e9) -> str:
    """Time of four all-reduces over message size, with the ring's crossovers."""
    beta = 1 / bandwidth
    lines = {
        name.replace("_", "-"): [
            (n, collective_time(f"{name}_all_reduce", n, ranks, alpha, beta))
            for n in _sizes(8, 30)
        ]
        for name in ALL_REDUCES
    }
    meet = crossover("tree_all_reduce", "ring_all_reduce", ranks, alpha, beta)
    return line_chart(
        lines,
        Axis("tensor", "log2", values.bytes_, ticks=[2.0**i for i in range(10, 31, 5)]),
        Axis("time", "log", values.seconds),
        f"Time of an all-reduce among {ranks} ranks",
        f"alpha {alpha * 1e6:g} us, {bandwidth / 1e9:g} GB/s; tree and ring meet at "
        f"{values.bytes_(meet)}",
        marks=[(meet, f"tree = ring: {values.bytes_(meet)}")],
    )


@REGISTRY
def nccl_choice(ranks: int = 64, nodes: int = 8, bandwidth: float = 100e9) -> str:
    """What NCCL's model expects of its ring and its double tree."""
    lines = {
        name: [
            (n, nccl_all_reduce_time(name, n, ranks, nodes, bandwidth))
            for n in _sizes(12, 33)
        ]
        for name in ("ring", "tree")
    }
    meet = next(
        (n for n in _sizes(12, 40, 512) if _nccl_ring_wins(n, ranks, nodes, bandwidth)),
        2.0**40,
    )
    return line_chart(
        lines,
        Axis("tensor", "log2", values.bytes_, ticks=[2.0**i for i in range(15, 34, 5)]),
        Axis("time", "log", values.seconds),
        f"NCCL's own estimate for {ranks} GPUs on {nodes} nodes",
        f"{bandwidth / 1e9:g} GB/s; they meet at about {values.bytes_(meet)}",
        marks=[(meet, f"tree = ring: about {values.bytes_(meet)}")],
    )


def _nccl_ring_wins(size: float, ranks: int, nodes: int, bandwidth: float) -> bool:
    ring, tree = (
        nccl_all_reduce_time(name, size, ranks, nodes, bandwidth)
        for name in ("ring", "tree")
    )
    return ring < tree


@REGISTRY
def tree_ring_crossover(bandwidth: float = 50e9) -> str:
    """The size from which the ring beats the tree, over the number of ranks."""
    counts = [2**i for i in range(2, 13)]
    lines = {}
    for alpha in (1e-6, 5e-6, 25e-6):
        lines[f"alpha {alpha * 1e6:g} us"] = [
            (
                p,
                crossover(
                    "tree_all_reduce", "ring_all_reduce", p, alpha, 1 / bandwidth
                ),
            )
            for p in counts
        ]
    return line_chart(
        lines,
        Axis("ranks", "log2", lambda p: f"{p:g}"),
        Axis("tensor", "log2", values.bytes_),
        "Above the line the ring is faster, below it the tree",
        f"Links of {bandwidth / 1e9:g} GB/s.",
    )


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
    from xtrain.plan import collective_traffic

    numel = 64 * ranks
    return collective_traffic(name, numel, ranks).max_sent / numel


@REGISTRY
def flat_or_hierarchical(
    local_ranks: int = 8,
    size: float = 2**30,
    alpha: float = 10e-6,
    intra: str = "nvlink4",
    inter: str = "infiniband-ndr",
) -> str:
    """Time of a flat ring and of the hierarchical all-reduce, over the nodes."""
    inside, across = Link.preset(intra), Link.preset(inter)
    counts = [2**i for i in range(1, 8)]
    lines = {
        "flat ring": [
            (k, collective_time("ring_all_reduce", size, k * local_ranks, alpha,
                                across.beta))
            for k in counts
        ],
        "hierarchical": [
            (k, hierarchical_time(size, local_ranks, k, (alpha, inside.beta),
                                  (alpha, across.beta)))
            for k in counts
        ],
    }  # fmt: skip
    return line_chart(
        lines,
        Axis("nodes", "log2", lambda k: f"{k:g}"),
        Axis("time", "linear", values.seconds),
        f"All-reduce of {values.bytes_(size)}, {local_ranks} ranks a node",
        f"{intra} inside a node, {inter} between nodes.",
    )


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


# ------------------------------------------------------------------ staleness


def stale_descent(delay: int, rate: float, steps: int) -> list[float]:
    """Distance to the minimum of x**2 / 2 when gradients are `delay` steps old."""
    seen = [1.0]
    for step in range(steps):
        gradient = seen[max(0, step - delay)]
        seen.append(seen[-1] - rate * gradient)
    return [abs(x) for x in seen]


AGES = {0: "fresh", 1: "1 step old"}


@REGISTRY
def stale_gradients(rate: float = 0.4, steps: int = 30) -> str:
    """Gradient descent with gradients that are 0, 1, 2 and 4 steps old."""
    lines = {
        AGES.get(delay, f"{delay} steps old"): [
            (float(i), x) for i, x in enumerate(stale_descent(delay, rate, steps))
        ]
        for delay in (0, 1, 2, 4)
    }
    return line_chart(
        lines,
        Axis("step", "linear", lambda n: f"{n:g}"),
        Axis("distance to the minimum", "linear"),
        "The same descent with fresh and with stale gradients",
        f"f(x) = x^2 / 2, learning rate {rate:g}.",
    )


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
