"""What a collective of lc1 really sends, held against its formula."""

from dataclasses import dataclass, field
from typing import Any

from xtrain.plan import collective_traffic

from ... import runs
from ...evidence import EvidenceError

M_BYTES = 96 * 1024
"""The full tensor of every run: divides by each of the world sizes."""


def sent(name: str, numel: int, ranks: int, root: int = 0) -> dict[str, Any]:
    """What the collective `name` of `xtrain.comm` sent, for a full tensor of `numel`.

    Returns lists by rank: sent and received (bytes), messages; and rounds.
    """
    from .runs import payload

    results = runs.remembered(payload, ranks, name, numel, root)
    return {
        "sent": [r["sent"] for r in results],
        "received": [r["received"] for r in results],
        "messages": [r["messages"] for r in results],
        "rounds": runs.rounds([r["events"] for r in results]),
    }


def wire(name: str, numel: int, ranks: int) -> dict[str, list[int | None]]:
    """Payload and wire bytes by rank of one call; `name` starts with xtrain. or torch.

    Wire bytes are None where the system does not count (everywhere but Linux).
    """
    from .runs import on_the_wire

    results = runs.remembered(on_the_wire, ranks, name, numel)
    return {what: [r[what] for r in results] for what in ("payload", "wire")}


@dataclass(frozen=True)
class Measured:
    """How a collective's run and formula are called for a full tensor of M bytes."""

    formula: str
    run: str = ""
    options: dict[str, int] = field(default_factory=dict)


MEASURED = {
    "broadcast": Measured("broadcast"),
    "broadcast_naive": Measured("broadcast_naive"),
    "reduce": Measured("reduce"),
    "gather": Measured("gather"),
    "scatter": Measured("scatter"),
    "ring_all_gather": Measured("ring_all_gather"),
    "ring_reduce_scatter": Measured("ring_reduce_scatter"),
    "all_to_all": Measured("all_to_all"),
    "parameter_server_all_reduce": Measured("parameter_server_all_reduce"),
    "ring_all_reduce": Measured("ring_all_reduce"),
    "tree_all_reduce": Measured("tree_all_reduce"),
    "halving_doubling_all_reduce": Measured("halving_doubling_all_reduce"),
    "one_shot_all_reduce": Measured(
        "one_shot_all_reduce", run="one_shot_all_reduce_by_p2p"
    ),
    "hierarchical_all_reduce": Measured(
        "hierarchical_all_reduce", run="hierarchical_2", options={"local_ranks": 2}
    ),
}


def compare(name: str, ranks: int) -> dict[str, list[int] | int]:
    """Run a collective; its numbers, once they equal the formula's on every rank."""
    known = MEASURED[name]
    numel = M_BYTES // runs.ITEMSIZE
    traffic = collective_traffic(known.formula, numel, ranks, **known.options)
    expected = traffic.bytes(runs.ITEMSIZE)
    found = sent(known.run or name, numel, ranks)
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
