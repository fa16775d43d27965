"""A dry run: a step of a recipe on a virtual cluster, by shapes alone.

    recipe, 1,024 ranks        pipeline 8 x data 16 x tensor 8
    alike but for the stage    rank 0   rank 128   rank 256  ...    8 ranks run
                               each stands for the 128 ranks of its stage

Ranks that differ in data, context, expert or tensor position alone come to each call at
the same time: there is no skew between them, experts get equal loads, and the first one
has the most sequences where shares differ. So the calls of a group cost what they cost
among all of it. Operators take what their FLOPs and bytes need at the accelerator's
peak rates, one after the other as they stand in the code (no fused kernels but
attention's). Batches are full, without document masks; data, logs and checkpoints are
left out. Where ranks differ, as Muon's do, all of them run.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from xtrain.cluster import VirtualCluster
from xtrain.cluster.recorder import WAIT, RunRecord
from xtrain.cluster.topology import Topology
from xtrain.cluster.topology_text import topology_of
from xtrain.comm.mesh import mesh_coordinates
from xtrain.plan import Layout
from xtrain.plan.hardware import Accelerator
from xtrain.plan.throughput import model_flops
from xtrain.testing.errors import RankError
from xtrain.train.dry_run_step import StepOfRank, step_of_rank
from xtrain.train.layouts import axes_of, check_layout
from xtrain.train.recipe import Recipe

OWN_LINKS = ("dgx_h100", "nvlink", "flat")
"""Topologies whose links belong to one rank each: groups of a kind share none."""
MOST_RANKS = 64
SHARE = {"all_reduce": 2}  # of a tensor, in times (N - 1) / N, that a rank sends
WHOLE = ("message", "broadcast", "reduce")


@dataclass(frozen=True)
class DryRun:
    """A step of a recipe on so many ranks.

    Attributes:
        executed: the ranks that ran.
        seconds: of the step.
        computed, waited: seconds of the busiest rank: in operators, and in calls by the
            axes of their group; "pipeline" has the bubble.
        sent: bytes that rank sent, by axis.
        fullest: the rank that holds most.
        memory: its bytes when it held most, by what they are for.
        processor: seconds that the dry run took on this machine.
    """

    recipe: Recipe
    topology: str
    accelerator: Accelerator
    executed: Sequence[int]
    seconds: float
    busiest: int
    computed: float
    waited: dict[str, float]
    sent: dict[str, float]
    fullest: int
    memory: dict[str, int]
    processor: float

    def __str__(self) -> str:
        """As a table, beside the planner."""
        from xtrain.train.dry_run_table import text

        return text(self)

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def tokens_per_second(self) -> float:
        return self.recipe.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """By FLOPs that count all pairs of positions, as the planner's."""
        flops = model_flops(self.recipe.model, self.recipe.data.sequence, 1)
        available = self.seconds * self.recipe.layout.gpus * self.accelerator.flops
        return self.recipe.batch * flops / available


class Hangs(RuntimeError):
    """The step does not end: who waits for whom, in which calls."""


def dry_run(
    recipe: Recipe,
    ranks: int,
    topology: str = "dgx_h100",
    accelerator: str | None = None,
    every_rank: bool = False,
) -> DryRun:
    """Run a step by its shapes.

    Args:
        ranks: of the layout.
        topology: as `xtrain cluster` takes it, "dgx_h100" or "flat:5e-6,50e9".
        accelerator: a preset of `xtrain.plan`; that of the topology unless given.
        every_rank: execute all ranks, not one of each class.

    Raises:
        ValueError: the layout does not make up the ranks, there is no such topology, or
            it has no accelerator and none is given; or the recipe's own rules.
        Hangs: the step does not end.
    """
    check_layout(recipe.layout, ranks)
    joined = topology_of(topology, ranks)
    device = accelerator_on(joined, topology, accelerator)
    every_rank = every_rank or needs_all(recipe, topology, ranks)
    inner = ranks // recipe.layout.pipeline
    cluster = VirtualCluster(
        ranks, joined, accelerator=device, record=True,
        alike=None if every_rank else lambda rank: rank - rank % inner,
    )  # fmt: skip
    begun = time.process_time()
    try:
        steps = cluster.run(step_of_rank, recipe)
    except RankError as error:
        if "deadlock" in str(error):
            raise Hangs(str(error).partition("\n\n")[0]) from None
        raise
    spent = time.process_time() - begun
    return measured(recipe, cluster, steps, spent)


def needs_all(recipe: Recipe, topology: str, ranks: int) -> bool:
    """Whether all ranks must be executed; ValueError if those are too many."""
    layout = recipe.layout
    name, why = topology.partition(":")[0].partition("(")[0], ""
    if name not in OWN_LINKS:
        why = f"topology {topology!r} has links that many ranks share"
    elif layout.replicate > 1:
        why = f"replicate={layout.replicate} makes groups that all ranks compare"
    elif recipe.optimizer.kind == "muon" and ranks > layout.pipeline:
        why = "optimizer.kind=muon deals each rank matrices of its own"
    if why and ranks > MOST_RANKS:
        raise ValueError(
            f"{why}, so all {ranks} would be executed: that is done up to {MOST_RANKS}"
        )
    return bool(why)


def accelerator_on(
    topology: Topology | None, name: str, given: str | None
) -> Accelerator:
    """What the ranks have; ValueError if its memory is not known."""
    if given is not None:
        return Accelerator.preset(given)
    if topology is None or topology.accelerator is None:
        raise ValueError(
            f"topology {name!r} has no accelerator, so its memory is not known: give "
            "one, --gpu h100"
        )
    return topology.accelerator


def measured(
    recipe: Recipe, cluster: VirtualCluster, steps: list[StepOfRank], spent: float
) -> DryRun:
    """The result, of the ranks that ran."""
    executed = sorted(set(cluster.stand_ins))
    busiest = max(executed, key=lambda rank: steps[rank].computed)
    fullest = max(executed, key=lambda rank: sum(steps[rank].memory.values()))
    begin, record = steps[0].begin, cluster.record
    assert record is not None and cluster.accelerator is not None
    return DryRun(
        recipe=recipe,
        topology="none" if cluster.topology is None else cluster.topology.name,
        accelerator=cluster.accelerator,
        executed=executed,
        seconds=max(step.end for step in steps) - begin,
        busiest=busiest,
        computed=steps[busiest].computed,
        waited=waits(record, busiest, begin, recipe.layout),
        sent=bytes_sent(record, busiest, begin, recipe.layout),
        fullest=fullest,
        memory=steps[fullest].memory,
        processor=spent,
    )


def waits(
    record: RunRecord, rank: int, begin: float, layout: Layout
) -> dict[str, float]:
    """Seconds that a rank waited in calls since it began, by axis, longest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for span in record.waits[rank]:
        if span.kind == WAIT and span.start >= begin:
            found[axis_of(span.ranks, layout)] += span.end - span.start
    return largest_first(found)


def bytes_sent(
    record: RunRecord, rank: int, begin: float, layout: Layout
) -> dict[str, float]:
    """Bytes that a rank sent since then, by axis, most first."""
    found: defaultdict[str, float] = defaultdict(float)
    for kind, ranks, nbytes, start, _ in record.transfers:
        among = ranks[0] == rank if kind == "message" else rank in ranks
        if not among or start < begin or len(ranks) == 1:
            continue
        share = 1.0
        if kind not in WHOLE:
            share = SHARE.get(kind, 1) * (len(ranks) - 1) / len(ranks)
        found[axis_of(ranks, layout)] += share * nbytes
    return largest_first(found)


def largest_first(found: dict[str, float]) -> dict[str, float]:
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def axis_of(ranks: Sequence[int], layout: Layout) -> str:
    """Along which axis of the layout a group lies, in the planner's words.

    Groups that sum gradients over data and other axes are "data".
    """
    sizes = axes_of(layout)
    if len(ranks) < 2:
        return "other"
    ends = [
        mesh_coordinates(rank, tuple(sizes.values()))
        for rank in ranks[:: len(ranks) - 1]
    ]
    names = [name for name, a, b in zip(sizes, *ends, strict=True) if a != b]
    if len(names) == 1:
        return names[0]
    if len(ranks) == layout.gpus:
        return "all ranks"
    return "data" if "pipeline" not in names else " and ".join(names)
