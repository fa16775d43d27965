"""Tables of the errata and the questions of lc4: what a layer keeps for backward."""

from typing import Any

from xtrain.plan import activation_memory

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table
from ...values import bytes_, percent


def kept(ranks: int, sequence_parallel: bool) -> dict[str, int]:
    """Bytes that autograd keeps of one layer on each rank."""
    from .runs_errata import bytes_saved

    found: list[dict[str, int]] = runs.remembered(bytes_saved, ranks, sequence_parallel)
    if any(other != found[0] for other in found):
        raise EvidenceError(f"ranks keep {found}")
    return found[0]


@REGISTRY
def bytes_kept_by_layer(most: int = 4) -> Table:
    """Bytes that a layer's forward keeps for backward, by ranks."""
    counts = [n for n in (1, 2, 4) if n <= most]
    rows = []
    for words, split in (("tensor parallelism", False), ("and the sequence", True)):
        found = [kept(n, split)["layer"] for n in counts]
        shares = [percent(f / found[0]) for f in found[1:]]
        rows.append([words, *map(count, found), *shares])
    header = ["cut", *(f"{n} rank{'s' * (n > 1)}" for n in counts),
              *(f"share on {n}" for n in counts[1:])]  # fmt: skip
    return Table(header, rows, "l" + "r" * (2 * len(counts) - 1))


GPT_3 = {"sequence": 2048, "batch": 1, "hidden": 12288, "heads": 96}


@REGISTRY
def activations_of_gpt_3(tensor: int = 8) -> Table:
    """Bytes per layer that GPT-3 keeps of a sequence, by how it is cut."""
    ways: dict[str, dict[str, Any]] = {
        "one device": {},
        "tensor parallelism": {"tensor": tensor},
        "and the sequence": {"tensor": tensor, "sequence_parallel": True},
    }
    rows = []
    for words, options in ways.items():
        found = [
            activation_memory(**GPT_3, **options, recompute=way)
            for way in ("none", "selective", "full")
        ]
        rows.append([words, *map(bytes_, found)])
    header = ["cut", "everything kept", "scores recomputed", "all recomputed"]
    return Table(header, rows, "lrrr")
