"""Lecture 1: collectives from point-to-point against gloo's own.

`size` is the whole tensor in bytes, and sums are exact: see
`xtrain.bench.collective_trials`.
"""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from xtrain.bench.collective_trials import (
    ITEM,
    KiB,
    MiB,
    all_gather_reference,
    all_reduce_reference,
    reduce_scatter_reference,
    trial,
)
from xtrain.bench.race import Case, Contestant, Goal, Race, Trial
from xtrain.comm import (
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    init_mesh,
    one_shot_all_reduce,
    parameter_server_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER
from xtrain.comm.collective_kinds import kind_of
from xtrain.plan import Traffic, collective_traffic

TITLE = "Lecture 1: collectives from send and receive, against gloo's own"


def hierarchical_trial(case: Case) -> Trial:
    """Two nodes of half the ranks each."""
    mesh = init_mesh((2, case.ranks // 2), ("node", "local"), case.device)
    groups = mesh.get_group("local"), mesh.get_group("node")
    return trial(
        "all_reduce",
        partial(hierarchical_all_reduce, intra_group=groups[0], inter_group=groups[1]),
        case,
    )


def traffic(algorithm: str, case: Case) -> Traffic:
    """Bytes of one call: the formula of `xtrain.plan` for a float32 tensor."""
    numel = case.size // ITEM
    options = {}
    if algorithm == "hierarchical_all_reduce":
        options["local_ranks"] = case.ranks // 2
    return collective_traffic(algorithm, numel, case.ranks, **options).bytes(ITEM)


def ours(name: str, algorithm: Callable[..., None]) -> Contestant:
    """A contestant from `xtrain.comm`, with its formula."""
    called = algorithm.__name__
    return Contestant(
        name, partial(trial, kind_of(called), algorithm), partial(traffic, called)
    )


RING = ours("ring", ring_all_reduce)
TREE = ours("binomial tree", tree_all_reduce)
ONE_SHOT = ours("one-shot", one_shot_all_reduce)
HALVING = ours("halving-doubling", halving_doubling_all_reduce)
SERVER = ours("parameter server", parameter_server_all_reduce)
HIERARCHICAL = Contestant(
    "hierarchical, 2 nodes",
    hierarchical_trial,
    partial(traffic, "hierarchical_all_reduce"),
    ranks=(4, 8),
)
GLOO = Contestant("gloo all-reduce", partial(trial, "all_reduce", dist.all_reduce))

REFERENCES = {
    "reduce_scatter": reduce_scatter_reference,
    "all_gather": all_gather_reference,
}


def part(
    kind: str, gloo: Callable[..., object], ring: Callable[..., None], least: float
) -> Race:
    """A half of the all-reduce: the ring against gloo, and the ratio asked of it."""
    title = kind.replace("_", "-")
    return Race(
        kind,
        title.capitalize(),
        (Contestant(f"gloo {title}", partial(trial, kind, gloo)), ours("ring", ring)),
        sizes=(256 * KiB, 16 * MiB, 64 * MiB),
        reference=REFERENCES[kind],
        goals=tuple(
            Goal("ring", least, size, ranks)
            for size in (16 * MiB, 64 * MiB)
            for ranks in (2, 4)
        ),
    )


RACES = [
    Race(
        "all_reduce_small",
        "All-reduce of a small tensor",
        (GLOO, ONE_SHOT, TREE, HALVING, RING, SERVER),
        sizes=(4 * KiB, 64 * KiB),
        reference=all_reduce_reference,
    ),
    Race(
        "all_reduce_single",
        "All-reduce of a small tensor, one call at a time",
        (GLOO, ONE_SHOT, TREE),
        sizes=(4 * KiB,),
        reference=all_reduce_reference,
        goals=(
            Goal("one-shot", 4.0, 4 * KiB, 4),
            Goal("binomial tree", 2.0, 4 * KiB, 4),
        ),
        single=True,
    ),
    Race(
        "all_reduce",
        "All-reduce of a large tensor",
        (GLOO, RING, HALVING, HIERARCHICAL, TREE, SERVER),
        sizes=(256 * KiB, 1 * MiB, 16 * MiB, 64 * MiB),
        reference=all_reduce_reference,
        goals=(Goal("ring", 0.9, 16 * MiB, 4), Goal("ring", 1.0, 64 * MiB, 4)),
    ),
    part("reduce_scatter", REDUCE_SCATTER, ring_reduce_scatter, 1.8),
    part("all_gather", ALL_GATHER, ring_all_gather, 1.5),
]
