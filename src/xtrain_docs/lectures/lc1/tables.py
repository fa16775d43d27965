"""Tables of the lc1 pages: formulas beside what real runs really sent."""

from collections.abc import Callable
from dataclasses import dataclass, field

from xtrain.plan import Link, collective_cost, collective_traffic

from .. import runs, values
from . import REGISTRY, Table

WORLD_SIZES = (2, 3, 4, 8)
HARD_SPACE = "\u00a0"
"""A space at which no line is broken."""
M_BYTES = 96 * 1024
"""The full tensor of every run: divides by each of the world sizes."""


class EvidenceError(ValueError):
    """A run contradicts a formula. Stops the build."""


def whole(numel: int, ranks: int) -> int:
    """What one rank hands in when every rank has the full tensor."""
    del ranks
    return numel


def piece(numel: int, ranks: int) -> int:
    """What one rank hands in when the full tensor is spread over the ranks."""
    return numel // ranks


@dataclass(frozen=True)
class Measured:
    """How a collective's run and formula are called for a full tensor of M bytes."""

    formula: str
    share: Callable[[int, int], int] = whole
    run: str = ""
    options: dict[str, int] = field(default_factory=dict)


MEASURED = {
    "broadcast": Measured("broadcast"),
    "broadcast_naive": Measured("broadcast_naive"),
    "reduce": Measured("reduce"),
    "gather": Measured("gather", piece),
    "scatter": Measured("scatter", piece),
    "ring_all_gather": Measured("ring_all_gather", piece),
    "ring_reduce_scatter": Measured("ring_reduce_scatter"),
    "all_to_all": Measured("all_to_all"),
    "parameter_server_all_reduce": Measured("parameter_server_all_reduce"),
    "ring_all_reduce": Measured("ring_all_reduce"),
    "tree_all_reduce": Measured("tree_all_reduce"),
    "halving_doubling_all_reduce": Measured("halving_doubling_all_reduce"),
    "one_shot_all_reduce": Measured("one_shot_all_reduce", run="one_shot_by_p2p"),
    "hierarchical_all_reduce": Measured(
        "hierarchical_all_reduce", run="hierarchical_2", options={"local_ranks": 2}
    ),
}


def count(number: float) -> str:
    """73728 as `73 728`."""
    return f"{int(number):,}".replace(",", HARD_SPACE)


def in_units(number: float) -> str:
    """1.5 as `1.5 M`; at most three digits behind the dot."""
    return f"{number:.3f}".rstrip("0").rstrip(".") + HARD_SPACE + "M"


def in_words(name: str) -> str:
    """`ring_all_reduce` as `ring all-reduce`: words can be broken on a phone."""
    hyphened = (
        ("_all_reduce", " all-reduce"), ("_all_gather", " all-gather"),
        ("reduce_scatter", "reduce-scatter"), ("all_to_all", "all-to-all"),
        ("halving_doubling", "halving-doubling"), ("one_shot", "one-shot"),
        ("_single", ""), ("broadcast_naive", "broadcast, naive"),
    )  # fmt: skip
    for ours, words in hyphened:
        name = name.replace(ours, words)
    return name.replace("_", " ")


def compare(name: str, ranks: int) -> dict[str, list[int] | int]:
    """Run a collective; its numbers, once they equal the formula's on every rank."""
    known = MEASURED[name]
    numel = known.share(M_BYTES // runs.ITEMSIZE, ranks)
    traffic = collective_traffic(known.formula, numel, ranks, **known.options)
    expected = traffic.bytes(runs.ITEMSIZE)
    found = runs.sent(known.run or name, numel, ranks)
    for what in ("sent", "received"):
        formula = list(getattr(expected, what))
        if found[what] != formula:
            raise EvidenceError(
                f"{name}, {ranks} ranks: {what} {found[what]}, formula {formula}"
            )
    if found["rounds"] != expected.rounds:
        raise EvidenceError(
            f"{name}, {ranks} ranks: {found['rounds']} rounds, "
            f"formula {expected.rounds}"
        )
    return found | {"formula": expected.max_sent}


@REGISTRY
def bytes_sent(name: str) -> Table:
    """Formula and measured bytes of the busiest sender, for 2, 3, 4 and 8 ranks."""
    rows = []
    for ranks in WORLD_SIZES:
        if ranks % MEASURED[name].options.get("local_ranks", 1):
            continue
        found = compare(name, ranks)
        busiest = max(found["sent"])
        rows.append(
            [
                str(ranks),
                count(found["formula"]),
                count(busiest),
                str(found["rounds"]),
                in_units(busiest / M_BYTES),
                in_units(sum(found["sent"]) / M_BYTES),
            ]
        )
    header = ["ranks", "formula, bytes", "measured", "rounds", "that is", "all ranks"]
    return Table(header, rows, "rrrrrr")


@REGISTRY
def all_collectives(ranks: int = 4) -> Table:
    """Every collective beside its formula: busiest rank, total, rounds."""
    rows = []
    for name in MEASURED:
        found = compare(name, ranks)
        cost = f"{in_units(max(found['sent']) / M_BYTES)}"
        rows.append(
            [
                in_words(name),
                cost,
                str(found["rounds"]),
                in_units(sum(found["sent"]) / M_BYTES),
                str(max(found["messages"])),
            ]
        )
    header = ["collective", "busiest rank sends", "rounds",
              "all ranks send", "messages of the busiest"]  # fmt: skip
    return Table(header, rows, "lrrrr")


WIRE_PAIRS = (
    ("ring_all_reduce", "all_reduce", whole),
    ("ring_reduce_scatter", "reduce_scatter_tensor", whole),
    ("ring_all_gather", "all_gather_into_tensor", piece),
    ("all_to_all_single", "all_to_all_single", whole),
    ("broadcast", "broadcast", whole),
    ("reduce", "reduce", whole),
)


@REGISTRY
def on_the_wire(ranks: int = 4, mebibytes: float = 1.5) -> Table:
    """Payload and wire bytes of ours, and wire bytes of torch's own over gloo."""
    size = int(mebibytes * 2**20)
    rows = []
    for ours, theirs, share in WIRE_PAIRS:
        numel = share(size // runs.ITEMSIZE, ranks)
        mine = runs.wire(f"xtrain.{ours}", numel, ranks)
        foreign = runs.wire(f"torch.{theirs}", numel, ranks)
        rows.append(
            [
                in_words(ours),
                in_units(_average(mine["payload"]) / size),
                _wire_share(mine["wire"], size),
                _wire_share(foreign["wire"], size),
            ]
        )
    header = ["", "ours, payload", "ours, on the wire", "gloo's own, on the wire"]
    return Table(header, rows, "lrrr")


def _average(numbers: list[int]) -> float:
    return sum(numbers) / len(numbers)


def _wire_share(counted: list[int] | None, size: int) -> str:
    if counted is None:
        return "not counted here"
    return in_units(_average(counted) / size)


ORDERS = ("rank 0 first", "even first", "together")


def order_rounds(order: str, ranks: int) -> int:
    """Rounds that N-1 ring shifts take in this order, from a real run."""
    from xtrain_docs.runs_lc1 import ring_step_orders

    return runs.rounds(runs.remembered(ring_step_orders, ranks, order))


@REGISTRY
def ring_orders() -> Table:
    """Rounds of the N-1 steps of a ring for three orders of send and receive."""
    rows = [
        [str(ranks), *(str(order_rounds(order, ranks)) for order in ORDERS)]
        for ranks in WORLD_SIZES
    ]
    return Table(["ranks", *ORDERS], rows, "rrrr")


@REGISTRY
def all_reduce_costs(ranks: int = 8) -> Table:
    """The alpha-beta coefficients of every all-reduce."""
    rows = []
    names = ["ring_all_reduce", "halving_doubling_all_reduce", "tree_all_reduce",
             "one_shot_all_reduce", "parameter_server_all_reduce"]  # fmt: skip
    for name in names:
        cost = collective_cost(name, ranks)
        rows.append(
            [
                in_words(name),
                str(cost.messages),
                in_units(float(cost.volume)),
                in_units(float(cost.reduced)),
            ]
        )
    header = ["algorithm", "messages", "bytes in a row", "bytes added"]
    return Table(header, rows, "lrrr")


@REGISTRY
def message_overhead() -> Table:
    """Payload and wire bytes of one message each way between two ranks."""
    rows = []
    for size in (4, 4096, 2**20):
        found = runs.wire("xtrain.exchange", size // runs.ITEMSIZE, 2)
        payload, wire = found["payload"][0], (found["wire"] or [None])[0]
        if payload != size:
            raise EvidenceError(f"a message of {size} bytes was counted as {payload}")
        more = "not counted here" if wire is None else count(wire - payload)
        on_wire = "not counted here" if wire is None else count(wire)
        rows.append([count(size), count(payload), on_wire, more])
    header = ["tensor, bytes", "ledger", "on the wire", "gloo adds"]
    return Table(header, rows, "rrrr")


@REGISTRY
def barrier_rounds() -> Table:
    """Rounds and messages of a barrier, formula and run."""
    rows = []
    for ranks in WORLD_SIZES:
        expected = collective_traffic("barrier", 1, ranks)
        found = runs.sent("barrier", 1, ranks)
        if found["rounds"] != expected.rounds:
            raise EvidenceError(f"barrier, {ranks} ranks: {found['rounds']} rounds")
        messages = found["messages"]
        rows.append([str(ranks), str(expected.rounds), str(found["rounds"]),
                     str(max(messages)), str(sum(messages))])  # fmt: skip
    header = ["ranks", "rounds, formula", "rounds, measured", "messages of a rank",
              "messages in all"]  # fmt: skip
    return Table(header, rows, "rrrrr")


@REGISTRY
def bytes_on_axes(shape: tuple[int, ...] = (2, 4), axes: str = "data,tensor") -> Table:
    """A ring all-reduce over each axis of a mesh: group size, formula, run."""
    from xtrain_docs.runs_lc1 import bytes_on_axes as run

    ranks, names = 1, axes.split(",")
    for size in shape:
        ranks *= size
    numel = M_BYTES // runs.ITEMSIZE
    found = runs.remembered(run, ranks, list(shape), names, numel)
    rows = []
    for at, (name, size) in enumerate(zip(names, shape, strict=True)):
        formula = collective_traffic("ring_all_reduce", numel, size).bytes(4).max_sent
        busiest = max(counts[at] for counts in found)
        if busiest != formula:
            raise EvidenceError(f"axis {name}: {busiest} bytes, formula {formula}")
        rows.append([f"`{name}`", str(ranks // size), str(size), count(formula),
                     count(busiest), in_units(busiest / M_BYTES)])  # fmt: skip
    header = ["axis", "groups", "ranks in each", "formula, bytes", "measured, bytes",
              "that is"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


@REGISTRY
def links() -> Table:
    """Links inside a node and between nodes, one direction."""
    places = {
        "nvlink3": "NVLink, A100",
        "nvlink4": "NVLink, H100",
        "nvlink5": "NVLink, B200",
        "infiniband-ndr": "InfiniBand NDR",
    }
    rows = []
    for name, where in places.items():
        link = Link.preset(name)
        rows.append([where, values.si(link.bandwidth, "B/s"),
                     values.si(link.duplex, "B/s"),
                     values.seconds(2**30 * link.beta)])  # fmt: skip
    header = ["link", "one way", "both ways", "1 GiB takes"]
    return Table(header, rows, "lrrr")
