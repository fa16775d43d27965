"""Tables of lc2 and lc3 beside torch's own classes, and of checkpoints."""

from xtrain.plan import RECIPES

from .. import runs
from . import REGISTRY, Table
from .lc1 import WORLD_SIZES, EvidenceError, count
from .lc3 import _share

SETTINGS = {
    "FULL_SHARD": "FSDP1, `FULL_SHARD`",
    "SHARD_GRAD_OP": "FSDP1, `SHARD_GRAD_OP`",
    "NO_SHARD": "FSDP1, `NO_SHARD`",
    "fully_shard freed": "FSDP2, resharded",
    "fully_shard kept": "FSDP2, not resharded",
    "ours freed": "ours, resharded",
    "ours kept": "ours, not resharded",
}


@REGISTRY
def fsdp_settings(ranks: int = 4) -> Table:
    """Weights at rest and collectives of a step of FSDP1, FSDP2 and ours."""
    from ..runs_lc3 import parameters_of_tower
    from ..runs_lc3_torch import settings

    whole = parameters_of_tower() * runs.ITEMSIZE
    rows = []
    for kind, words in SETTINGS.items():
        found = runs.remembered(settings, ranks, kind)[0]
        share = f"{found['held'] / whole:g}"
        numbers = (str(found[k] or "-") for k in ("gathers", "scatters", "reduces"))
        rows.append([words, count(found["held"]), share, *numbers])
    header = ["", "weights at rest, bytes", "of all", "all-gathers", "reduce-scatters",
              "all-reduces"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


@REGISTRY
def ddp_beside_torch(ranks: int = 4, width: int = 256) -> Table:
    """All-reduces, their payload and the wire bytes of a step: torch's DDP and ours."""
    from ..runs_lc3 import parameters_of_tower
    from ..runs_lc3_torch import ddp_on_the_wire

    phi = parameters_of_tower(width) * runs.ITEMSIZE
    rows = []
    for kind, words, more in (("torch", "torch", 0), ("ours", "ours", runs.ITEMSIZE)):
        found = runs.remembered(ddp_on_the_wire, ranks, kind, width)
        payload = sum(found[0]["payload"])
        if payload != phi + more:  # ours has a flag in the last bucket
            raise EvidenceError(f"{kind}: all-reduces {payload} bytes, not {phi}")
        rows.append([words, str(found[0]["calls"]), count(payload),
                     _share([r["wire"] for r in found], phi)])  # fmt: skip
    header = ["", "all-reduces", "bytes reduced", "a rank sends"]
    return Table(header, rows, "lrrr")


@REGISTRY
def checkpoint_bytes() -> Table:
    """Bytes a rank writes for a checkpoint, equal to the formula; header and index."""
    from ..runs_lc3 import parameters_of_tower
    from ..runs_lc3_torch import checkpoint_files

    recipe = RECIPES["fp32"]
    total = parameters_of_tower() * (recipe.weight + recipe.moments)
    rows = []
    for ranks in (1, *WORLD_SIZES):
        found = runs.remembered(checkpoint_files, ranks)
        states = [result["state"] for result in found]
        if sum(states) != total:
            raise EvidenceError(f"{ranks} ranks wrote {sum(states)}, not {total}")
        rest = max(result["rest"] for result in found)
        rows.append([str(ranks), count(sum(states)), count(max(states)), count(rest),
                     count(found[0]["index"])])  # fmt: skip
    header = ["ranks", "weights and moments, bytes", "of them in a file",
              "else in it", "index"]  # fmt: skip
    return Table(header, rows, "rrrrr")
