"""Tables of the lc2 pages: what a step of data parallelism sends."""

from xtrain.plan import collective_cost, collective_traffic

from .. import runs
from . import REGISTRY, Table
from .lc1 import HARD_SPACE, WORLD_SIZES, EvidenceError, count


def in_phi(number: float) -> str:
    """1.5 as `1.5 Phi`, in Greek; at most three digits behind the dot."""
    return f"{number:.3f}".rstrip("0").rstrip(".") + HARD_SPACE + "\u03a6"


def sent_by_ddp(ranks: int, micro_batches: int = 1, quiet: bool = True) -> int:
    """Bytes the busiest rank sends in a step, once they equal the formula."""
    from ..runs_lc2 import parameters_of_net, payload_of_step

    found = runs.remembered(payload_of_step, ranks, micro_batches, quiet)
    numel = parameters_of_net() + 1  # the spare element of the last bucket
    once = collective_traffic("ring_all_reduce", numel, ranks).bytes(runs.ITEMSIZE)
    times = 1 if quiet else micro_batches
    formula = [times * sent for sent in once.sent]
    measured = [result["sent"] for result in found]
    if measured != formula:
        raise EvidenceError(f"DDP, {ranks} ranks: sent {measured}, formula {formula}")
    return max(measured)


@REGISTRY
def ddp_bytes() -> Table:
    """Formula and measured bytes of one step, for 2, 3, 4 and 8 ranks."""
    from ..runs_lc2 import parameters_of_net

    phi = parameters_of_net()
    rows = []
    for ranks in WORLD_SIZES:
        measured = sent_by_ddp(ranks)
        formula = 2 * (ranks - 1) / ranks * phi * runs.ITEMSIZE
        rows.append([str(ranks), count(formula), count(measured),
                     in_phi(measured / runs.ITEMSIZE / phi)])  # fmt: skip
    header = ["ranks", "$2\\frac{N-1}{N}\\Phi$, bytes", "measured", "that is"]
    return Table(header, rows, "rrrr")


@REGISTRY
def bucket_calls(ranks: int = 4) -> Table:
    """Collectives of one step: one a parameter, and buckets of three sizes."""
    from ..runs_lc2 import calls_of_step

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
    from ..runs_lc2 import parameters_of_net

    phi = parameters_of_net() * runs.ITEMSIZE
    rows = []
    for micro_batches in (1, 2, 4, 8):
        every = sent_by_ddp(ranks, micro_batches, False)
        once = sent_by_ddp(ranks, micro_batches, True)
        rows.append([str(micro_batches), count(every), in_phi(every / phi),
                     count(once), in_phi(once / phi)])  # fmt: skip
    header = ["micro-batches", "reduced every time, bytes", "that is",
              "with `no_sync`, bytes", "that is"]  # fmt: skip
    return Table(header, rows, "rrrrr")
