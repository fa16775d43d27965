"""The plan of replicas: properties of any plan, the best one of small cases."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.expert_parallel.expert_placement import (
    ExpertPlacement,
    Move,
    plan_placement,
)
from xtrain.expert_parallel.packing import pack, replica_counts

MODULE = "xtrain.expert_parallel.expert_placement"
PACKING = "xtrain.expert_parallel.packing"
TABLE = f"{MODULE}:ExpertPlacement"
PLAN = f"{MODULE}:plan_placement"


@st.composite
def problems(draw, most_experts=12, most_ranks=5):
    """Loads, ranks, slots: as many ties and zeros as large differences."""
    experts = draw(st.integers(1, most_experts))
    ranks = draw(st.integers(1, most_ranks))
    slots = draw(st.integers(-(-experts // ranks), experts))
    numbers = draw(
        st.sampled_from(
            [st.integers(0, 3), st.integers(0, 1000), st.floats(0, 1e6, width=32)]
        )
    )
    return draw(st.lists(numbers, min_size=experts, max_size=experts)), ranks, slots


def largest(loads, table) -> float:
    counts = [sum(e in held for held in table) for e in range(len(loads))]
    return max(sum(loads[e] / counts[e] for e in held) for held in table)


@given(problems())
@pytest.mark.verifies(PLAN, TABLE)
def test_every_expert_has_a_place_and_none_twice_on_a_rank(problem):
    loads, ranks, slots = problem
    plan = plan_placement(loads, ranks, slots)
    assert len(plan.experts) == ranks
    for held in plan.experts:
        assert len(held) <= slots and len(set(held)) == len(held)
    assert {e for held in plan.experts for e in held} == set(range(len(loads)))
    for e in range(len(loads)):
        there = [r for r in range(ranks) if e in plan.experts[r]]
        assert list(plan.ranks_of(e)) == there
        assert plan.share(e) * len(there) == pytest.approx(1)
    used = sum(map(len, plan.experts))
    full = pack(loads, replica_counts(loads, ranks * slots, ranks), ranks, slots)
    if used < ranks * slots:  # replicas would have made it slower
        assert used == len(loads)
        assert max(plan.load_of_rank) < largest(loads, full)


@given(problems())
@pytest.mark.verifies(PLAN, TABLE, f"{PACKING}:pack", f"{PACKING}:_lowered")
@pytest.mark.verifies(f"{PACKING}:_exchanges", f"{MODULE}:_planned")
def test_the_fullest_rank_is_within_one_replica_of_the_emptiest(problem):
    loads, ranks, slots = problem
    plan = plan_placement(loads, ranks, slots)
    load = plan.load_of_rank
    assert sum(load) == pytest.approx(sum(loads))
    replica = max(loads[e] * plan.share(e) for e in range(len(loads)))
    rounding = 1e-6 * sum(loads)
    assert max(load) <= min(load) + replica + rounding
    mean = sum(loads) / ranks
    assert max(load) <= mean + (ranks - 1) / ranks * replica + rounding
    assert plan.slowdown == pytest.approx(max(load) / mean if mean else 1)


@given(problems())
@pytest.mark.verifies(PLAN)
def test_replicas_never_make_it_slower_and_equal_loads_give_equal_plans(problem):
    loads, ranks, slots = problem
    plan = plan_placement(loads, ranks, slots)
    alone = plan_placement(loads, ranks, -(-len(loads) // ranks))
    once = pack(loads, [1] * len(loads), ranks, -(-len(loads) // ranks))
    most = largest(loads, once) * (1 + 1e-12)  # the sums are in other orders
    assert max(plan.load_of_rank) <= most
    assert max(alone.load_of_rank) <= most
    assert plan == plan_placement(tuple(loads), ranks, slots)


@given(problems(most_experts=5, most_ranks=3))
@pytest.mark.verifies(f"{PACKING}:replica_counts")
def test_no_other_counts_have_a_smaller_largest_load_per_replica(problem):
    loads, ranks, slots = problem
    together = ranks * slots
    counts = replica_counts(loads, together, ranks)
    assert sum(counts) == together and all(1 <= c <= ranks for c in counts)

    def per_replica(counts):
        return max(load / count for load, count in zip(loads, counts, strict=True))

    possible = product(range(1, ranks + 1), repeat=len(loads))
    best = min(per_replica(c) for c in possible if sum(c) == together)
    assert per_replica(counts) == pytest.approx(best)


def best_possible(loads, ranks, slots) -> float:
    """The smallest largest load of any table, by trying them all."""
    held = [
        c for n in range(slots + 1) for c in combinations(range(len(loads)), n)
    ]  # fmt: skip
    tables = combinations_with_all(held, ranks, len(loads))
    return min(largest(loads, table) for table in tables)


def combinations_with_all(held, ranks, experts):
    for table in product(held, repeat=ranks):
        if (
            list(table) == sorted(table)
            and len({e for h in table for e in h}) == experts
        ):
            yield table


SMALL = [
    ([8, 2, 2, 1], 2, 3), ([4, 3, 2, 1], 2, 3), ([4, 3, 2, 1], 2, 2),
    ([9, 1, 1, 1], 3, 2), ([5, 5, 5], 3, 1), ([0, 0, 0, 7], 2, 2), ([3, 3, 2], 3, 3),
    ([7, 5, 3, 2, 1], 2, 3), ([1, 2, 3, 4, 5], 2, 4), ([10, 6, 5], 2, 2),
]  # fmt: skip


@pytest.mark.verifies(PLAN)
def test_small_plans_are_the_best_there_are_but_for_two():
    """The best of all tables, found by trying them all."""
    found: dict[tuple, float] = {}
    for loads, ranks, slots in SMALL:
        mine = max(plan_placement(loads, ranks, slots).load_of_rank)
        found[str(loads), ranks, slots] = mine / best_possible(loads, ranks, slots)
    missed = {case: ratio for case, ratio in found.items() if ratio > 1 + 1e-9}
    # 8 twice and 1 twice: 6.5 on each rank; who replicates 2 before 1 gets 7 and 6
    assert missed.pop(("[8, 2, 2, 1]", 2, 3)) == pytest.approx(7 / 6.5)
    assert missed.pop(("[1, 2, 3, 4, 5]", 2, 4)) == pytest.approx(8 / 7.5)
    assert missed == {}


@given(problems(most_experts=4, most_ranks=3))
@settings(max_examples=30)
@pytest.mark.verifies(PLAN)
def test_no_plan_is_twice_as_slow_as_the_best(problem):
    loads, ranks, slots = problem
    mine = max(plan_placement(loads, ranks, slots).load_of_rank)
    assert mine <= best_possible(loads, ranks, slots) * (2 - 1 / ranks) + 1e-6


@given(st.data())
@pytest.mark.verifies(PLAN, f"{MODULE}:check_groups")
def test_groups_stay_on_their_node(data):
    nodes, per_node = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    groups, size = nodes * data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    local = groups // nodes * size
    slots = data.draw(st.integers(-(-local // per_node), local))
    counts = st.integers(0, 50)
    loads = data.draw(st.lists(counts, min_size=groups * size, max_size=groups * size))
    plan = plan_placement(
        loads, nodes * per_node, slots, groups=groups, ranks_per_node=per_node
    )
    held = [set() for _ in range(nodes)]
    for rank, experts in enumerate(plan.experts):
        held[rank // per_node] |= {e // size for e in experts}
    assert all(len(groups_here) == groups // nodes for groups_here in held)
    assert set.union(*held) == set(range(groups))
    node_loads = [sum(sum(loads[g * size : (g + 1) * size]) for g in h) for h in held]
    largest_group = max(sum(loads[g * size : (g + 1) * size]) for g in range(groups))
    assert max(node_loads) <= min(node_loads) + largest_group
    for node, total in enumerate(node_loads):  # and balanced inside it
        load = plan.load_of_rank[node * per_node : (node + 1) * per_node]
        assert sum(load) == pytest.approx(total)
        replica = max(loads[e] * plan.share(e) for e in range(len(loads)))
        assert max(load) <= min(load) + replica + 1e-6


@given(problems(), st.randoms())
@pytest.mark.verifies(TABLE, f"{MODULE}:Move")
def test_moves_lead_from_one_plan_to_the_other(problem, random):
    loads, ranks, slots = problem
    before = plan_placement(loads, ranks, slots)
    changed = list(loads)
    random.shuffle(changed)
    after = plan_placement(changed, ranks, slots)
    have = [set(held) for held in before.experts]
    for expert, source, rank in before.moves(after):
        assert expert in before.experts[source], "the source had it before"
        assert expert not in have[rank], "nothing is sent twice"
        have[rank].add(expert)
    assert all(set(held) <= have[rank] for rank, held in enumerate(after.experts))
    new = sum(
        len(set(a) - set(b)) for a, b in zip(after.experts, before.experts, strict=True)
    )
    assert len(before.moves(after)) == new
    assert before.moves(before) == []


@given(problems(), st.integers(0, 30))
@pytest.mark.verifies(TABLE)
def test_a_sender_spreads_its_tokens_over_the_replicas(problem, tokens):
    loads, ranks, slots = problem
    plan = plan_placement(loads, ranks, slots)
    for expert in range(len(loads)):
        went = [plan.rank_for(expert, number) for number in range(tokens)]
        got = [went.count(rank) for rank in plan.ranks_of(expert)]
        assert sum(got) == tokens
        assert max(got) - min(got) <= 1


@pytest.mark.verifies(TABLE, PLAN, f"{MODULE}:Move")
def test_the_example_of_the_header():
    plan = plan_placement([8, 2, 2, 1], 2, 3)
    assert plan.experts == ((0, 1, 2), (0, 1, 3))
    assert plan.load_of_rank == (7, 6)
    alone = plan_placement([8, 2, 2, 1], 2, 2)
    assert alone.experts == ((0, 3), (1, 2))
    assert alone.load_of_rank == (9, 4)
    assert (plan.slowdown, alone.slowdown) == (14 / 13, 18 / 13)
    table = ExpertPlacement((1.0,) * 3, ((0, 1), (0, 2), ()), 3)
    after = ExpertPlacement((1.0,) * 3, ((1,), (0,), (0, 1, 2)), 3)
    assert table.moves(after) == [Move(0, 0, 2), Move(1, 0, 2), Move(2, 1, 2)]
    both = ExpertPlacement((1.0,), ((0,), (0,), (), ()), 1)
    everywhere = ExpertPlacement((1.0,), ((0,),) * 4, 1)
    assert both.moves(everywhere) == [Move(0, 0, 2), Move(0, 1, 3)]


@pytest.mark.verifies(PLAN)
def test_equal_loads_are_taken_in_order():
    plan = plan_placement([1] * 4, 2, 3)
    assert plan.experts == ((0, 1, 2), (0, 1, 3))
    assert plan_placement([1] * 4, 4, 1).experts == ((0,), (1,), (2,), (3,))


WRONG_TABLES = {
    "an expert of no rank": (((0,), (0,)), 2, r"experts \[1\] are on no rank"),
    "twice on a rank": (((0, 0), (1,)), 2, "rank 0 holds an expert twice"),
    "too many": (((0, 1), (1,)), 1, "rank 0 holds 2 experts and has 1 slots"),
    "unknown": (((0, 1), (2,)), 2, r"rank 1 holds \[2\], but experts are 0 to 1"),
    "negative": (((0, 1), (-1,)), 2, r"rank 1 holds \[-1\]"),
}


@pytest.mark.parametrize("case", WRONG_TABLES)
@pytest.mark.verifies(TABLE)
def test_a_wrong_table_is_refused(case):
    experts, slots, message = WRONG_TABLES[case]
    with pytest.raises(ValueError, match=message):
        ExpertPlacement((1.0, 2.0), experts, slots)


WRONG_PLANS = {
    "too few slots": (([1] * 5, 2, 2), {}, "5 experts do not fit 2 ranks with 2 slots"),
    "no ranks": (([1], 0, 1), {}, "do not fit 0 ranks"),
    "too many slots": (([1, 1], 2, 3), {}, "a rank holds an expert once"),
    "no loads": (([], 2, 1), {}, "loads are counts"),
    "a negative load": (([1, -1], 2, 1), {}, "loads are counts"),
    "not a number": (([1, float("nan")], 2, 1), {}, "loads are counts"),
    "infinite": (([1, float("inf")], 2, 1), {}, "loads are counts"),
    "groups alone": (([1] * 4, 2, 2), {"groups": 2}, "give both or none"),
    "nodes alone": (([1] * 4, 2, 2), {"ranks_per_node": 1}, "give both or none"),
    "negative groups": (
        ([1] * 4, 2, 2), {"groups": -2, "ranks_per_node": 1}, "give both or none",
    ),
    "half a node": (
        ([1] * 4, 3, 2), {"groups": 2, "ranks_per_node": 2}, "3 ranks are not",
    ),
    "uneven groups": (
        ([1] * 5, 2, 3), {"groups": 2, "ranks_per_node": 1}, "groups have equal sizes",
    ),
    "fewer groups than nodes": (
        ([1] * 6, 2, 3), {"groups": 3, "ranks_per_node": 1}, "the same number of them",
    ),
    "a node without room": (
        ([1] * 8, 4, 4), {"groups": 4, "ranks_per_node": 4}, None,
    ),
    "slots that a node cannot use": (
        ([1] * 4, 4, 3), {"groups": 2, "ranks_per_node": 2}, "but 2 experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_PLANS)
@pytest.mark.verifies(f"{MODULE}:check_loads", f"{MODULE}:check_slots")
@pytest.mark.verifies(f"{MODULE}:check_groups")
def test_a_plan_that_cannot_be_is_refused(case):
    arguments, options, message = WRONG_PLANS[case]
    if message is None:  # right: the only node holds them all
        plan_placement(*arguments, **options)
        return
    with pytest.raises(ValueError, match=message):
        plan_placement(*arguments, **options)


@pytest.mark.verifies(TABLE)
def test_placements_of_other_sizes_have_no_moves():
    with pytest.raises(ValueError, match="4 experts on 2 ranks cannot become 4 ex"):
        plan_placement([1] * 4, 2, 2).moves(plan_placement([1] * 4, 4, 1))
