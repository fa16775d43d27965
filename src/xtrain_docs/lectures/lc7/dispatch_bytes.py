"""Tables of the page on expert ranks: what the all-to-alls of a layer send."""

from typing import Any

from xtrain.plan import all_to_all_bytes, routed_bytes

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table
from .dispatch import PHASES


def counted(ranks: int, uniform: bool) -> list[dict[str, Any]]:
    """Bytes of each rank and phase; EvidenceError unless the routing's, exactly."""
    from .runs_dispatch import HIDDEN, ITEMSIZE, bytes_of_layer

    found = runs.remembered(bytes_of_layer, ranks, uniform)
    copies = [one["copies"] for one in found]
    out = routed_bytes(copies, HIDDEN, itemsize=ITEMSIZE)
    transposed = [list(column) for column in zip(*copies, strict=True)]
    back = routed_bytes(transposed, HIDDEN, itemsize=ITEMSIZE)
    for rank, one in enumerate(found):
        right = dict(zip(PHASES, (out[rank], back[rank], out[rank], back[rank]),
                         strict=True))  # fmt: skip
        said = {phase: one[phase] for phase in PHASES}
        if said != right:
            raise EvidenceError(f"rank {rank} of {ranks}: {said}, formula {right}")
    return found


@REGISTRY
def expert_bytes(ranks: int = 4) -> Table:
    """Bytes that each rank sends in the four all-to-alls of a layer, counted."""
    rows = []
    for rank, one in enumerate(counted(ranks, False)):
        rows.append([str(rank), ", ".join(map(str, one["copies"])),
                     *(count(one[phase]) for phase in PHASES),
                     count(one["counts"])])  # fmt: skip
    header = ["rank", "copies for each rank", *PHASES, "counts"]
    return Table(header, rows, "rlrrrrr")


@REGISTRY
def expert_bytes_uniform(sizes: tuple[int, ...] = (1, 2, 4, 8)) -> Table:
    """With uniform routing: bytes of a token in one all-to-all, beside the formula."""
    from .runs_dispatch import HIDDEN, ITEMSIZE, TOKENS, TOP_K

    rows = []
    for ranks in sizes:
        found = counted(ranks, True)
        formula = all_to_all_bytes(TOKENS, TOP_K, HIDDEN, ranks, itemsize=ITEMSIZE)
        if any(one[phase] != formula for one in found for phase in PHASES):
            raise EvidenceError(f"{ranks} ranks: {found}, not {formula}")
        rows.append([str(ranks), f"{formula / TOKENS:g}",
                     f"{found[0]['dispatch'] / TOKENS:g}",
                     f"{found[0]['combine'] / TOKENS:g}",
                     count(found[0]["counts"])])  # fmt: skip
    header = ["ranks", "formula", "dispatch", "combine", "counts, in all"]
    return Table(header, rows, "rrrrr")
