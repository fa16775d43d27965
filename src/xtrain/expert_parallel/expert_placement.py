"""Which ranks hold which experts; experts with large loads have several replicas.

    tokens of experts 0 to 3: 8 2 2 1, on 2 ranks

    3 slots each    rank 0    0 (4)  1 (1)  2 (2)    7 tokens
                    rank 1    0 (4)  1 (1)  3 (1)    6
    2 slots each    rank 0    0 (8)  3 (1)           9
                    rank 1    1 (2)  2 (2)           4

Tokens of an expert are spread evenly over its replicas. A rank computes until its own
tokens are done and all ranks wait for the slowest, so the largest load of a rank is the
time of the layer. Planned in three steps:

    replicate   the expert with the largest load per replica gets the next replica: no
                other choice makes the largest load per replica smaller
    spread      heaviest first, each onto the ranks with the most free slots
    swap        while a swap or a move of replicas lowers the fullest rank's load

When no swap lowers it further, the fullest rank is above the emptiest by one replica's
load at most: largest <= mean + (ranks - 1) / ranks x the largest load of a replica. No
table is better than the mean, nor than its largest replica, which is smallest here: so
a plan is less than twice as slow as the best one, which only trying them all finds.

With `groups` (of node-limited routing: consecutive experts) and `ranks_per_node`, whole
groups are first packed onto nodes, then each node is planned by itself: a token that
has experts of few groups is sent to few nodes.

No torch, no messages: `ExpertPlacement.moves` lists what a change has to send.
Source: DeepSeek's expert parallelism load balancer, EPLB, 2025, for the three levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import NamedTuple

from xtrain.expert_parallel.packing import pack, replica_counts


class Move(NamedTuple):
    """Send the weights of `expert` from rank `source` to `rank`."""

    expert: int
    source: int
    rank: int


@dataclass(frozen=True)
class ExpertPlacement:
    """A table: `experts[rank]` are the experts in this rank's slots.

    Raises:
        ValueError: an expert on no rank, twice on a rank, or unknown; too many on a
            rank; loads that are negative or not finite.
    """

    loads: tuple[float, ...]
    """Tokens of each expert that the plan expects."""
    experts: tuple[tuple[int, ...], ...]
    slots_per_rank: int

    def __post_init__(self) -> None:
        check_loads(self.loads)
        for rank, held in enumerate(self.experts):
            if len(held) > self.slots_per_rank:
                raise ValueError(
                    f"rank {rank} holds {len(held)} experts and has "
                    f"{self.slots_per_rank} slots"
                )
            if len(set(held)) < len(held):
                raise ValueError(f"rank {rank} holds an expert twice: {list(held)}")
            unknown = [e for e in held if not 0 <= e < len(self.loads)]
            if unknown:
                raise ValueError(
                    f"rank {rank} holds {unknown}, but experts are 0 to "
                    f"{len(self.loads) - 1}"
                )
        missing = [e for e in range(len(self.loads)) if not self.ranks_of(e)]
        if missing:
            raise ValueError(f"experts {missing} are on no rank")

    @cached_property
    def _ranks_of(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.loads]
        for rank, held in enumerate(self.experts):
            for expert in held:
                found[expert].append(rank)
        return tuple(tuple(ranks) for ranks in found)

    def ranks_of(self, expert: int) -> tuple[int, ...]:
        """The ranks with a replica of this expert, in order."""
        return self._ranks_of[expert]

    def share(self, expert: int) -> float:
        """The part of the expert's tokens that each of its replicas gets."""
        return 1 / len(self.ranks_of(expert))

    def rank_for(self, expert: int, number: int) -> int:
        """Where the copy `number` of a token for this expert goes: one after another.

        Each sender counts `number` by itself, and each replica gets its share of every
        sender's tokens.
        """
        ranks = self.ranks_of(expert)
        return ranks[number % len(ranks)]

    @property
    def load_of_rank(self) -> tuple[float, ...]:
        """Expected tokens of each rank."""
        return tuple(
            sum(self.loads[e] * self.share(e) for e in held) for held in self.experts
        )

    @property
    def slowdown(self) -> float:
        """The largest load of a rank over the mean: 1 when all are equal."""
        largest, total = max(self.load_of_rank), sum(self.loads)
        return largest * len(self.experts) / total if total else 1.0

    def moves(self, after: "ExpertPlacement") -> list[Move]:
        """What has to be sent to go from this placement to `after`.

        A replica that a rank already has is not sent. The senders of an expert take
        turns.
        """
        if (len(self.loads), len(self.experts)) != (
            len(after.loads),
            len(after.experts),
        ):
            raise ValueError(
                f"{len(self.loads)} experts on {len(self.experts)} ranks cannot become "
                f"{len(after.loads)} experts on {len(after.experts)} ranks"
            )
        found = []
        for expert in range(len(self.loads)):
            have = self.ranks_of(expert)
            new = [r for r in after.ranks_of(expert) if r not in have]
            found += [
                Move(expert, self.rank_for(expert, n), r) for n, r in enumerate(new)
            ]
        return found


def plan_placement(
    loads: Sequence[float],
    ranks: int,
    slots_per_rank: int,
    *,
    groups: int | None = None,
    ranks_per_node: int | None = None,
) -> ExpertPlacement:
    """A table for these loads: replicate, spread, swap (see above).

    All slots are used unless replicas make the largest load of a rank larger than one
    replica of each expert does: then there is one of each. Equal loads are taken in
    the order of their experts, so that every rank that plans finds the same table.

    Args:
        loads: tokens of each expert, counted over some steps.
        groups: of consecutive experts, each kept on one node.

    Raises:
        ValueError: fewer slots than experts, more slots than each expert on each rank
            needs, groups that do not divide over nodes.
    """
    check_loads(loads)
    check_slots(len(loads), ranks, slots_per_rank)
    if groups is None and ranks_per_node is None:
        table = _planned(list(loads), ranks, slots_per_rank)
        return ExpertPlacement(tuple(loads), _frozen(table), slots_per_rank)
    nodes, size = check_groups(len(loads), ranks, groups, ranks_per_node)
    group_loads = [sum(loads[g : g + size]) for g in range(0, len(loads), size)]
    per_node = len(group_loads) // nodes
    check_slots(per_node * size, ranks // nodes, slots_per_rank)
    table = []
    for held in pack(group_loads, [1] * len(group_loads), nodes, per_node):
        mine = [g * size + e for g in sorted(held) for e in range(size)]
        local = _planned([loads[e] for e in mine], ranks // nodes, slots_per_rank)
        table += [[mine[e] for e in held_here] for held_here in local]
    return ExpertPlacement(tuple(loads), _frozen(table), slots_per_rank)


def _planned(loads: list[float], ranks: int, slots: int) -> list[list[int]]:
    """The better of two: all slots used, and one replica of each expert."""
    counts = replica_counts(loads, ranks * slots, ranks)
    once = [1] * len(loads)
    tables = [(counts, pack(loads, counts, ranks, slots))]
    tables += [(once, pack(loads, once, ranks, -(-len(loads) // ranks)))]

    def largest(plan: tuple[list[int], list[list[int]]]) -> float:
        counts, table = plan
        return max(sum(loads[e] / counts[e] for e in held) for held in table)

    return min(tables, key=largest)[1]  # of equals, the first


def _frozen(table: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(held)) for held in table)


def check_loads(loads: Sequence[float]) -> None:
    """ValueError unless there are loads, all finite and at least 0."""
    wrong = [x for x in loads if not (isfinite(x) and x >= 0)]
    if wrong or not loads:
        raise ValueError(f"loads are counts of tokens, 0 or more each: got {loads}")


def check_slots(experts: int, ranks: int, slots: int) -> None:
    """ValueError unless each expert has a slot and every slot can be used."""
    if ranks < 1 or not experts <= ranks * slots:
        raise ValueError(
            f"{experts} experts do not fit {ranks} ranks with {slots} slots each"
        )
    if slots > experts:
        raise ValueError(
            f"{slots} slots on a rank, but {experts} experts: a rank holds an expert "
            "once"
        )


def check_groups(
    experts: int, ranks: int, groups: int | None, ranks_per_node: int | None
) -> tuple[int, int]:
    """Nodes, and experts in a group; ValueError unless everything divides."""
    if not groups or not ranks_per_node or groups < 1 or ranks_per_node < 1:
        raise ValueError(
            f"groups={groups} and ranks_per_node={ranks_per_node}: give both or none"
        )
    if ranks % ranks_per_node:
        raise ValueError(
            f"{ranks} ranks are not divisible by ranks_per_node={ranks_per_node}"
        )
    nodes = ranks // ranks_per_node
    if experts % groups or groups % nodes:
        raise ValueError(
            f"{experts} experts in {groups} groups on {nodes} nodes: groups have equal "
            "sizes and each node holds the same number of them"
        )
    return nodes, experts // groups
