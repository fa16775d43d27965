"""Tables of the lc3 pages beside torch's own classes, and of checkpoints."""

from xtrain.plan import RECIPES

from ... import runs
from ...evidence import WORLD_SIZES, EvidenceError, count
from ...tables import REGISTRY, Table

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
    from .runs_torch import settings
    from .runs_training import parameters_of_tower

    whole = parameters_of_tower() * runs.ITEMSIZE
    rows = []
    for kind, words in SETTINGS.items():
        found = runs.remembered(settings, ranks, kind)[0]
        share = f"{found['weights'] / whole:g}"
        numbers = (str(found[k] or "-") for k in ("gathers", "scatters", "reduces"))
        rows.append([words, count(found["weights"]), share, *numbers])
    header = ["", "weights at rest, bytes", "of all", "all-gathers", "reduce-scatters",
              "all-reduces"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


@REGISTRY
def checkpoint_bytes() -> Table:
    """Bytes a rank writes for a checkpoint, equal to the formula; header and index."""
    from .runs_torch import checkpoint_files
    from .runs_training import parameters_of_tower

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
