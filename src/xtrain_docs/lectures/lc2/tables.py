"""Tables of the lc2 pages: what a step of data parallelism sends."""

from xtrain.plan import collective_cost, collective_traffic

from ... import runs
from ...evidence import (
    PHI,
    WORLD_SIZES,
    EvidenceError,
    average_in_units,
    count,
    in_units,
)
from ...tables import REGISTRY, Table


def sent_by_ddp(ranks: int, micro_batches: int = 1, no_sync: bool = True) -> int:
    """Bytes the busiest rank sends in a step, once they equal the formula."""
    from .runs import parameters_of_net, payload_of_step

    found = runs.remembered(payload_of_step, ranks, micro_batches, no_sync)
    numel = parameters_of_net() + 1  # the spare element of the last bucket
    once = collective_traffic("ring_all_reduce", numel, ranks).bytes(runs.ITEMSIZE)
    times = 1 if no_sync else micro_batches
    formula = [times * sent for sent in once.sent]
    measured = [result["sent"] for result in found]
    if measured != formula:
        raise EvidenceError(f"DDP, {ranks} ranks: sent {measured}, formula {formula}")
    return max(measured)


@REGISTRY
def ddp_bytes() -> Table:
    """Formula and measured bytes of one step, for 2, 3, 4 and 8 ranks."""
    from .runs import parameters_of_net

    phi = parameters_of_net()
    rows = []
    for ranks in WORLD_SIZES:
        measured = sent_by_ddp(ranks)
        formula = 2 * (ranks - 1) / ranks * phi * runs.ITEMSIZE
        rows.append([str(ranks), count(formula), count(measured),
                     in_units(measured / runs.ITEMSIZE / phi, PHI)])  # fmt: skip
    header = ["ranks", "$2\\frac{N-1}{N}\\Phi$, bytes", "measured", "that is"]
    return Table(header, rows, "rrrr")


@REGISTRY
def bucket_calls(ranks: int = 4) -> Table:
    """Collectives of one step: one a parameter, and buckets of three sizes."""
    from .runs import calls_of_step

    rows = []
    chain = collective_cost("ring_all_reduce", ranks).messages
    kinds = (("naive", 0), ("buckets", 18), ("buckets", 36), ("buckets", 1024))
    for wrapper, cap in kinds:
        calls = runs.remembered(calls_of_step, ranks, wrapper, cap)[0]
        name = "one a parameter" if wrapper == "naive" else f"buckets of {cap} KiB"
        rows.append([name, str(len(calls)), count(min(calls)), count(max(calls)),
                     str(chain * len(calls))])  # fmt: skip
    header = ["", "all-reduces", "smallest, bytes", "largest, bytes",
              "messages in a row"]  # fmt: skip
    return Table(header, rows, "lrrrr")


@REGISTRY
def accumulation_bytes(ranks: int = 4) -> Table:
    """Bytes of a step of k micro-batches, with and without no_sync."""
    from .runs import parameters_of_net

    phi = parameters_of_net() * runs.ITEMSIZE
    rows = []
    for micro_batches in (1, 2, 4, 8):
        every = sent_by_ddp(ranks, micro_batches, False)
        once = sent_by_ddp(ranks, micro_batches, True)
        rows.append([str(micro_batches), count(every), in_units(every / phi, PHI),
                     count(once), in_units(once / phi, PHI)])  # fmt: skip
    header = ["micro-batches", "reduced every time, bytes", "that is",
              "with `no_sync`, bytes", "that is"]  # fmt: skip
    return Table(header, rows, "rrrrr")


@REGISTRY
def ddp_beside_torch(ranks: int = 4, width: int = 256) -> Table:
    """All-reduces, their payload and the wire bytes of a step: torch's DDP and ours."""
    from .runs import ddp_on_the_wire, parameters_of_net

    phi = parameters_of_net(width) * runs.ITEMSIZE
    rows = []
    for kind, words, more in (("torch", "torch", 0), ("ours", "ours", runs.ITEMSIZE)):
        found = runs.remembered(ddp_on_the_wire, ranks, kind, width)
        payload = sum(found[0]["payload"])
        if payload != phi + more:  # ours has a flag in the last bucket
            raise EvidenceError(f"{kind}: all-reduces {payload} bytes, not {phi}")
        wire = average_in_units([r["wire"] for r in found], phi, PHI)
        rows.append([words, str(found[0]["calls"]), count(payload), wire])
    header = ["", "all-reduces", "bytes reduced", "a rank sends"]
    return Table(header, rows, "lrrr")
