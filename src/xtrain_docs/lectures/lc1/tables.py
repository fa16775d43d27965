"""Tables of the lc1 pages: formulas beside what real runs really sent."""

from xtrain.plan import collective_traffic

from ... import runs
from ...evidence import (
    WORLD_SIZES,
    EvidenceError,
    average_in_units,
    count,
    in_units,
)
from ...tables import REGISTRY, Table
from .measured import M_BYTES, MEASURED, compare, sent, wire


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
                in_units(busiest / M_BYTES, "M"),
                in_units(sum(found["sent"]) / M_BYTES, "M"),
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
        rows.append(
            [
                in_words(name),
                in_units(max(found["sent"]) / M_BYTES, "M"),
                str(found["rounds"]),
                in_units(sum(found["sent"]) / M_BYTES, "M"),
                str(max(found["messages"])),
            ]
        )
    header = ["collective", "busiest rank sends", "rounds",
              "all ranks send", "messages of the busiest"]  # fmt: skip
    return Table(header, rows, "lrrrr")


WIRE_PAIRS = (
    ("ring_all_reduce", "all_reduce"),
    ("ring_reduce_scatter", "reduce_scatter_tensor"),
    ("ring_all_gather", "all_gather_into_tensor"),
    ("all_to_all_single", "all_to_all_single"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
)


@REGISTRY
def on_the_wire(ranks: int = 4, mebibytes: float = 1.5) -> Table:
    """Payload and wire bytes of ours, and wire bytes of torch's own over gloo."""
    size = int(mebibytes * 2**20)
    rows = []
    for ours, theirs in WIRE_PAIRS:
        numel = size // runs.ITEMSIZE
        mine = wire(f"xtrain.{ours}", numel, ranks)
        foreign = wire(f"torch.{theirs}", numel, ranks)
        rows.append(
            [
                in_words(ours),
                average_in_units(mine["payload"], size, "M"),
                average_in_units(mine["wire"], size, "M"),
                average_in_units(foreign["wire"], size, "M"),
            ]
        )
    header = ["", "ours, payload", "ours, on the wire", "gloo's own, on the wire"]
    return Table(header, rows, "lrrr")


ORDERS = ("rank 0 first", "even first", "together")


def order_rounds(order: str, ranks: int) -> int:
    """Rounds that N-1 ring shifts take in this order, from a real run."""
    from .runs import ring_step_orders

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
def message_overhead() -> Table:
    """Payload and wire bytes of one message each way between two ranks."""
    rows = []
    for size in (4, 4096, 2**20):
        found = wire("xtrain.exchange", size // runs.ITEMSIZE, 2)
        payload, counted = found["payload"][0], found["wire"][0]
        if payload != size:
            raise EvidenceError(f"a message of {size} bytes was counted as {payload}")
        more = "not counted here" if counted is None else count(counted - payload)
        on_wire = "not counted here" if counted is None else count(counted)
        rows.append([count(size), count(payload), on_wire, more])
    header = ["tensor, bytes", "ledger", "on the wire", "gloo adds"]
    return Table(header, rows, "rrrr")


@REGISTRY
def barrier_rounds() -> Table:
    """Rounds and messages of a barrier, formula and run."""
    rows = []
    for ranks in WORLD_SIZES:
        expected = collective_traffic("barrier", 1, ranks)
        found = sent("barrier", 1, ranks)
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
    from .runs import bytes_on_axes as run

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
                     count(busiest), in_units(busiest / M_BYTES, "M")])  # fmt: skip
    header = ["axis", "groups", "ranks in each", "formula, bytes", "measured, bytes",
              "that is"]  # fmt: skip
    return Table(header, rows, "lrrrrr")
