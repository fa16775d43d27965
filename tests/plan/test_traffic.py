"""Bytes per rank: against a simulation that moves real values, and as properties."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan import all_reduce_lower_bound, chunk_sizes, collective_traffic
from xtrain.plan.collective_traffic import ALGORITHMS, hierarchical_between_nodes

T = "xtrain.plan.traffic"
C = "xtrain.plan.collective_traffic"

sizes = st.integers(0, 200)
worlds = st.integers(1, 40)
powers = st.sampled_from([1, 2, 4, 8, 16, 32])

ALL_REDUCES = [
    "ring_all_reduce",
    "tree_all_reduce",
    "halving_doubling_all_reduce",
    "parameter_server_all_reduce",
    "one_shot_all_reduce",
]


class Wire:
    """Moves values between ranks and counts them."""

    def __init__(self, ranks):
        self.sent, self.received = [0] * ranks, [0] * ranks

    def move(self, src, dst, values):
        self.sent[src] += len(values)
        self.received[dst] += len(values)
        return list(values)


def cut(values, parts):
    out, start = [], 0
    for length in chunk_sizes(len(values), parts):
        out.append(values[start : start + length])
        start += length
    return out


def simulate_ring(data, phases=(0, 1)):
    """Ring all-reduce on lists; returns (result per rank, wire).

    Phase 0 is the reduce-scatter, phase 1 the all-gather.
    """
    ranks = len(data)
    wire = Wire(ranks)
    chunks = [cut(values, ranks) for values in data]
    for phase in phases:
        for step in range(ranks - 1):
            flying = {}
            for rank in range(ranks):
                index = (rank - 1 + phase - step) % ranks
                right = (rank + 1) % ranks
                flying[right] = (index, wire.move(rank, right, chunks[rank][index]))
            for rank, (index, values) in flying.items():
                if phase == 0:
                    mine = chunks[rank][index]
                    values = [a + b for a, b in zip(mine, values, strict=True)]
                chunks[rank][index] = values
    return [[x for c in mine for x in c] for mine in chunks], wire


def simulate_halving_doubling(data):
    """Rabenseifner on lists, any number of ranks."""
    ranks = len(data)
    wire = Wire(ranks)
    data = [list(values) for values in data]
    core = 1
    while core * 2 <= ranks:
        core *= 2
    for late in range(core, ranks):
        values = wire.move(late, late - core, data[late])
        mine = data[late - core]
        data[late - core] = [a + b for a, b in zip(mine, values, strict=True)]
    windows = [[(0, len(data[0]))] for _ in range(core)]  # per rank, wide to narrow
    distance = core // 2
    while distance:
        before = [list(values) for values in data]
        for me in range(core):
            low, high = windows[me][-1]
            middle = low + (high - low + 1) // 2
            mine = (low, middle) if me & distance == 0 else (middle, high)
            windows[me].append(mine)
            keep, other = slice(*mine), me ^ distance
            values = wire.move(other, me, before[other][keep])
            data[me][keep] = [
                a + b for a, b in zip(before[me][keep], values, strict=True)
            ]
        distance //= 2
    distance = 1
    while distance < core:
        before = [list(values) for values in data]
        finished = [windows[rank].pop() for rank in range(core)]
        for me in range(core):
            other = me ^ distance
            part = slice(*finished[other])
            data[me][part] = wire.move(other, me, before[other][part])
        distance *= 2
    for late in range(core, ranks):
        data[late] = wire.move(late - core, late, data[late - core])
    return data, wire


@pytest.mark.verifies(
    f"{T}:chunk_sizes",
    f"{C}:collective_traffic",
    f"{C}:halving_doubling_all_reduce",
    f"{T}:ring_all_reduce",
)
@given(sizes, st.integers(1, 12))
@pytest.mark.parametrize(
    ("algorithm", "simulate"),
    [
        ("ring_all_reduce", simulate_ring),
        ("halving_doubling_all_reduce", simulate_halving_doubling),
    ],
)
def test_formula_counts_what_a_simulation_moves(algorithm, simulate, numel, ranks):
    data = [[3**rank + 100 * i for i in range(numel)] for rank in range(ranks)]
    results, wire = simulate(data)
    assert results == [[sum(column) for column in zip(*data, strict=True)]] * ranks
    traffic = collective_traffic(algorithm, numel, ranks)
    assert (traffic.sent, traffic.received) == (tuple(wire.sent), tuple(wire.received))


@pytest.mark.verifies(f"{T}:chunk_sizes", f"{T}:ring_reduce_scatter")
@given(sizes, st.integers(1, 12))
def test_an_uneven_reduce_scatter_counts_what_a_simulation_moves(numel, ranks):
    data = [[3**rank + 100 * i for i in range(numel)] for rank in range(ranks)]
    results, wire = simulate_ring(data, phases=(0,))
    sums = cut([sum(column) for column in zip(*data, strict=True)], ranks)
    for rank, mine in enumerate(results):
        assert cut(mine, ranks)[rank] == sums[rank]
    traffic = collective_traffic("ring_reduce_scatter", numel, ranks)
    assert (traffic.sent, traffic.received) == (tuple(wire.sent), tuple(wire.received))


@pytest.mark.verifies(
    f"{C}:all_to_all",
    f"{T}:broadcast",
    f"{T}:broadcast_naive",
    f"{T}:gather",
    f"{C}:hierarchical_all_reduce",
    f"{C}:recursive_doubling_all_reduce",
    f"{T}:reduce",
    f"{T}:scatter",
)
@given(sizes, worlds, st.data())
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_what_is_sent_is_received(algorithm, numel, ranks, data):
    options = {}
    if algorithm == "recursive_doubling_all_reduce":
        ranks = data.draw(powers)
    if algorithm == "hierarchical_all_reduce":
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        options["local_ranks"] = data.draw(st.sampled_from(divisors))
    if algorithm == "all_to_all":
        ranks = min(ranks, 8)
        row = st.lists(sizes, min_size=ranks, max_size=ranks)
        options["splits"] = data.draw(st.lists(row, min_size=ranks, max_size=ranks))
    if algorithm in ("broadcast", "broadcast_naive", "reduce", "gather", "scatter"):
        options["root"] = data.draw(st.integers(0, ranks - 1))
    traffic = collective_traffic(algorithm, numel, ranks, **options)
    assert len(traffic.sent) == len(traffic.received) == ranks
    assert sum(traffic.sent) == sum(traffic.received)
    assert min(traffic.sent) >= 0
    assert min(traffic.received) >= 0
    if ranks == 1:
        assert (traffic.total, traffic.rounds) == (0, 0)


@pytest.mark.verifies(
    f"{T}:all_reduce_lower_bound",
    f"{C}:halving_doubling_all_reduce",
    f"{C}:one_shot_all_reduce",
    f"{C}:parameter_server_all_reduce",
    f"{T}:ring_all_reduce",
    f"{C}:tree_all_reduce",
)
@given(sizes, worlds)
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_no_all_reduce_beats_the_lower_bound(algorithm, numel, ranks):
    traffic = collective_traffic(algorithm, numel, ranks)
    assert traffic.average_sent >= all_reduce_lower_bound(ranks) * numel


@pytest.mark.verifies(f"{T}:all_reduce_lower_bound")
@given(st.integers(1, 50), worlds)
def test_the_ring_meets_the_lower_bound(pieces, ranks):
    traffic = collective_traffic("ring_all_reduce", pieces * ranks, ranks)
    exact = all_reduce_lower_bound(ranks) * pieces * ranks
    assert set(traffic.sent) == {exact}
    assert traffic.average_sent == exact


@given(sizes, worlds)
def test_an_uneven_ring_differs_by_at_most_two_elements(numel, ranks):
    traffic = collective_traffic("ring_all_reduce", numel, ranks)
    assert traffic.max_sent - min(traffic.sent) <= 2
    assert traffic.average_sent == all_reduce_lower_bound(ranks) * numel


@given(st.integers(1, 20), powers)
def test_halving_doubling_meets_the_lower_bound_on_powers_of_two(pieces, ranks):
    traffic = collective_traffic("halving_doubling_all_reduce", pieces * ranks, ranks)
    assert set(traffic.sent) == {all_reduce_lower_bound(ranks) * pieces * ranks}
    assert traffic.rounds == 2 * (ranks.bit_length() - 1)


@pytest.mark.verifies(f"{T}:ring_all_gather", f"{T}:ring_reduce_scatter")
@given(sizes, worlds)
def test_all_reduce_is_reduce_scatter_then_all_gather(numel, ranks):
    halves = collective_traffic("ring_reduce_scatter", numel, ranks).then(
        collective_traffic("ring_all_gather", numel, ranks)
    )
    assert halves == collective_traffic("ring_all_reduce", numel, ranks)


@pytest.mark.verifies(f"{T}:chunk_sizes")
@given(sizes, worlds)
def test_chunks_are_cut_as_torch_cuts_them(numel, parts):
    torch = pytest.importorskip("torch")
    pieces = torch.tensor_split(torch.arange(numel), parts)
    assert chunk_sizes(numel, parts) == [len(piece) for piece in pieces]


@pytest.mark.verifies(
    f"{T}:broadcast",
    f"{T}:broadcast_naive",
    f"{C}:parameter_server_all_reduce",
    f"{C}:tree_all_reduce",
)
def test_hubs_and_trees_load_ranks_unevenly():
    naive = collective_traffic("broadcast_naive", 10, 8, root=3)
    assert naive.sent == (0, 0, 0, 70, 0, 0, 0, 0)
    tree = collective_traffic("broadcast", 10, 8)
    assert (tree.total, tree.max_sent, tree.rounds) == (70, 30, 3)
    server = collective_traffic("parameter_server_all_reduce", 10, 8)
    ring = collective_traffic("ring_all_reduce", 16, 8)
    assert server.max_sent == server.max_received == 70
    assert ring.max_sent == ring.max_received == 28
    assert collective_traffic("tree_all_reduce", 10, 8).max_sent == 30


@pytest.mark.verifies(f"{T}:van_de_geijn_broadcast")
def test_a_scattered_broadcast_spreads_the_roots_load():
    whole = 64
    naive = collective_traffic("broadcast_naive", whole, 8)
    scattered = collective_traffic("van_de_geijn_broadcast", whole, 8)
    share = Fraction(7, 8) * whole
    assert naive.max_sent == 7 * whole
    assert scattered.sent[0] == 2 * share
    assert set(scattered.sent[1:]) == {share}


@pytest.mark.verifies(f"{C}:hierarchical_all_reduce", f"{C}:hierarchical_between_nodes")
def test_hierarchy_sends_one_share_across_nodes():
    numel, local, nodes = 64, 4, 2
    traffic = collective_traffic(
        "hierarchical_all_reduce", numel, local * nodes, local_ranks=local
    )
    crossing = hierarchical_between_nodes(numel, local * nodes, local)
    inside = all_reduce_lower_bound(local) * numel
    across = all_reduce_lower_bound(nodes) * Fraction(numel, local)
    assert set(traffic.sent) == {inside + across}
    assert set(crossing.sent) == {across}
    # As many bytes as one flat ring, but only `across` of them leave the node.
    assert inside + across == all_reduce_lower_bound(local * nodes) * numel


@pytest.mark.verifies(f"{C}:hierarchical_between_nodes", f"{T}:ring_all_gather")
@given(sizes, st.integers(1, 6), st.integers(1, 6))
def test_a_hierarchy_counts_its_three_steps_on_the_padded_tensor(numel, local, nodes):
    """13 elements on 2 nodes of 4: shards of 4, and 16 elements inside the node."""
    shard = -(-numel // local)
    inside = collective_traffic("ring_reduce_scatter", shard * local, local).then(
        collective_traffic("ring_all_gather", shard * local, local)
    )
    across = collective_traffic("ring_all_reduce", shard, nodes)
    traffic = collective_traffic(
        "hierarchical_all_reduce", numel, local * nodes, local_ranks=local
    )
    crossing = hierarchical_between_nodes(numel, local * nodes, local)
    for rank in range(local * nodes):
        node, place = divmod(rank, local)
        assert crossing.sent[rank] == across.sent[node]
        assert crossing.received[rank] == across.received[node]
        assert traffic.sent[rank] == inside.sent[place] + across.sent[node]
        assert traffic.received[rank] == inside.received[place] + across.received[node]
    assert traffic.rounds == inside.rounds + across.rounds


@pytest.mark.verifies(f"{C}:all_to_all")
def test_all_to_all_keeps_its_own_piece_at_home():
    traffic = collective_traffic("all_to_all", 12, 4)
    assert traffic.sent == traffic.received == (9, 9, 9, 9)
    uneven = collective_traffic("all_to_all", 0, 2, splits=[[5, 0], [2, 7]])
    assert (uneven.sent, uneven.received) == ((0, 2), (2, 0))


def test_bytes_multiply_by_the_item_size():
    traffic = collective_traffic("ring_all_reduce", 13, 4)
    assert traffic.bytes(4).sent == tuple(4 * count for count in traffic.sent)
    assert traffic.bytes(4).rounds == traffic.rounds


@pytest.mark.verifies(f"{C}:recursive_doubling_all_reduce")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", 4, 4), "algorithm='ring' is not one of broadcast_naive, "),
        (("ring_all_reduce", 4, 0), "ranks >= 1"),
        (("ring_all_reduce", -1, 2), "numel >= 0"),
        (("all_to_all", 10, 4), "10 elements do not divide among 4"),
        (("recursive_doubling_all_reduce", 4, 6), "power of two, got 6"),
    ],
)
def test_bad_questions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        collective_traffic(*arguments)


def test_hierarchy_must_divide_the_ranks():
    with pytest.raises(ValueError, match="6 ranks do not divide into nodes of 4"):
        collective_traffic("hierarchical_all_reduce", 8, 6, local_ranks=4)
