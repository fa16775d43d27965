"""Alpha-beta times, crossovers and bus bandwidths against published figures."""

from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan import (
    Accelerator,
    Link,
    algorithm_bandwidth,
    all_reduce_lower_bound,
    bus_bandwidth,
    bus_bandwidth_factor,
    collective_cost,
    collective_time,
    collective_traffic,
    crossover,
    fastest,
    hierarchical_time,
    nccl_all_reduce_time,
    nccl_protocol,
)
from xtrain.plan.collective_traffic import ALGORITHMS
from xtrain.plan.cost import COSTS
from xtrain.plan.nccl import NCCL_PROTOCOLS

C = "xtrain.plan.cost"
N = "xtrain.plan.nccl"
MICRO, GB = 1e-6, 1e9
ALPHA, BETA, GAMMA = 5e-6, 1 / 50e9, 1 / 200e9

powers = st.sampled_from([2, 4, 8, 16, 32, 64])
worlds = st.integers(2, 64)
bytes_ = st.integers(1, 2**34)

# Not van de Geijn's broadcast: its time is that of another all-gather.
BOTH = sorted((COSTS.keys() & ALGORITHMS.keys()) - {"van_de_geijn_broadcast"})


# The literature's formulas: messages, bytes over n, added-up bytes over n.
ANY_RANKS = {
    "ring_all_gather": lambda p: (p - 1, (p - 1) / p, 0),
    "ring_reduce_scatter": lambda p: (p - 1, (p - 1) / p, (p - 1) / p),
    "ring_all_reduce": lambda p: (2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p),
    "bidirectional_ring_all_gather": lambda p: (p // 2, (p - 1) / p / 2, 0),
    # Hubs send to one rank after another.
    "broadcast_naive": lambda p: (p - 1, p - 1, 0),
    "gather": lambda p: (p - 1, (p - 1) / p, 0),
    "scatter": lambda p: (p - 1, (p - 1) / p, 0),
    "all_to_all": lambda p: (p - 1, (p - 1) / p, 0),
    "one_shot_all_reduce": lambda p: (p - 1, p - 1, p - 1),
    "parameter_server_all_reduce": lambda p: (2 * (p - 1), 2 * (p - 1), p - 1),
}
POWERS_OF_TWO = {
    "recursive_doubling_all_gather": lambda p: (log2(p), (p - 1) / p, 0),
    "recursive_halving_reduce_scatter": lambda p: (log2(p), (p - 1) / p, (p - 1) / p),
    "halving_doubling_all_reduce": lambda p: (
        2 * log2(p), 2 * (p - 1) / p, (p - 1) / p,
    ),
    "recursive_doubling_all_reduce": lambda p: (log2(p), log2(p), log2(p)),
    "broadcast": lambda p: (log2(p), log2(p), 0),
    "reduce": lambda p: (log2(p), log2(p), log2(p)),
    "tree_all_reduce": lambda p: (2 * log2(p), 2 * log2(p), log2(p)),
    "van_de_geijn_broadcast": lambda p: (2 * log2(p), 2 * (p - 1) / p, 0),
    "double_tree_all_reduce": lambda p: (2 * log2(p), 2, 1),
}  # fmt: skip


@pytest.mark.verifies(f"{C}:Cost", f"{C}:collective_time", f"{C}:_ring_all_reduce")
@given(st.data(), bytes_)
@pytest.mark.parametrize("algorithm", sorted(ANY_RANKS | POWERS_OF_TWO))
def test_times_follow_the_printed_formulas(algorithm, data, size):
    ranks = data.draw(worlds if algorithm in ANY_RANKS else powers)
    messages, volume, reduced = (ANY_RANKS | POWERS_OF_TWO)[algorithm](ranks)
    expected = messages * ALPHA + volume * size * BETA + reduced * size * GAMMA
    measured = collective_time(algorithm, size, ranks, ALPHA, BETA, GAMMA)
    assert measured == pytest.approx(expected, rel=1e-12)


@pytest.mark.verifies(f"{C}:collective_cost")
@given(powers, st.integers(1, 20))
@pytest.mark.parametrize("algorithm", BOTH)
def test_no_rank_sends_more_than_the_time_pays_for(algorithm, ranks, pieces):
    """The same size, that of the full tensor, on both sides."""
    numel = ranks * pieces
    cost = collective_cost(algorithm, ranks)
    traffic = collective_traffic(algorithm, numel, ranks)
    busiest = max(traffic.max_sent, traffic.max_received)
    assert busiest <= cost.volume * numel
    assert traffic.rounds <= cost.messages


@pytest.mark.verifies(f"{C}:collective_cost")
@given(worlds, st.integers(1, 20))
@pytest.mark.parametrize(
    "algorithm",
    ["ring_all_gather", "ring_reduce_scatter", "ring_all_reduce", "gather", "scatter"],
)
def test_time_pays_for_what_the_busiest_rank_moves(algorithm, ranks, pieces):
    """Of a piece, as of a whole tensor, the full tensor's size is what is given."""
    numel = ranks * pieces
    traffic = collective_traffic(algorithm, numel, ranks)
    busiest = max(traffic.max_sent, traffic.max_received)
    assert busiest == collective_cost(algorithm, ranks).volume * numel


@pytest.mark.verifies(f"{C}:collective_cost")
@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 24])
def test_ranks_between_powers_of_two_pay_two_more_messages(ranks):
    cost = collective_cost("halving_doubling_all_reduce", ranks)
    core = 2 ** int(log2(ranks))
    assert cost.messages == 2 * int(log2(ranks)) + 2
    assert cost.volume == all_reduce_lower_bound(core) + 2
    assert cost.reduced == all_reduce_lower_bound(core) / 2 + 1


@pytest.mark.verifies(f"{C}:collective_cost")
@pytest.mark.parametrize(("ranks", "depth"), [(3, 2), (5, 3), (6, 3), (7, 3), (9, 4)])
def test_trees_between_powers_of_two_are_a_level_deeper(ranks, depth):
    for algorithm, coefficients in (
        ("broadcast", (depth, depth, 0)),
        ("reduce", (depth, depth, depth)),
        ("tree_all_reduce", (2 * depth, 2 * depth, depth)),
        ("double_tree_all_reduce", (2 * depth, 2, 1)),
    ):
        cost = collective_cost(algorithm, ranks)
        assert (cost.messages, cost.volume, cost.reduced) == coefficients, algorithm


@pytest.mark.verifies(f"{C}:collective_cost", f"{C}:collective_time")
@given(worlds, bytes_)
def test_one_rank_is_free_and_more_ranks_cost_more_latency(ranks, size):
    assert collective_time("ring_all_reduce", size, 1, ALPHA, BETA, GAMMA) == 0
    shorter = collective_cost("ring_all_reduce", ranks)
    longer = collective_cost("ring_all_reduce", ranks + 1)
    assert longer.messages == shorter.messages + 2
    assert shorter.volume < longer.volume < 2


# ------------------------------------------------------------------- crossovers


@pytest.mark.verifies(f"{C}:crossover")
@pytest.mark.parametrize(
    ("ranks", "doubling_kb", "tree_kb"), [(8, 600, 471), (64, 372, 2841)]
)
def test_published_crossovers(ranks, doubling_kb, tree_kb):
    where = (ranks, ALPHA, BETA)
    doubling = crossover(
        "recursive_doubling_all_reduce", "halving_doubling_all_reduce", *where
    )
    tree = crossover("tree_all_reduce", "ring_all_reduce", *where)
    assert doubling / 1e3 == pytest.approx(doubling_kb, abs=0.5)
    assert tree / 1e3 == pytest.approx(tree_kb, abs=0.5)


@pytest.mark.verifies(f"{C}:crossover")
@given(powers, st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
def test_crossovers_follow_their_solved_formulas(ranks, alpha, beta):
    depth = log2(ranks)
    tree = alpha * (ranks - 1 - depth) / (beta * (depth - (ranks - 1) / ranks))
    solved = crossover("tree_all_reduce", "ring_all_reduce", ranks, alpha, beta)
    assert solved == pytest.approx(tree, rel=1e-9)
    if ranks > 2:
        other = alpha * depth / (beta * (depth - 2 * (ranks - 1) / ranks))
        solved = crossover(
            "recursive_doubling_all_reduce",
            "halving_doubling_all_reduce",
            ranks,
            alpha,
            beta,
        )
        assert solved == pytest.approx(other, rel=1e-9)


@pytest.mark.verifies(
    f"{C}:Cost", f"{C}:collective_time", f"{C}:crossover", f"{C}:fastest"
)
@given(st.integers(3, 64))
def test_both_take_equally_long_at_the_crossover(ranks):
    names = ["tree_all_reduce", "ring_all_reduce"]
    size = crossover(*names, ranks, ALPHA, BETA, GAMMA)
    tree, ring = (
        collective_time(name, size, ranks, ALPHA, BETA, GAMMA) for name in names
    )
    assert tree == pytest.approx(ring, rel=1e-9)
    if ranks > 3:
        assert fastest(names, size / 2, ranks, ALPHA, BETA, GAMMA) == names[0]
    assert fastest(names, size * 2 + 1, ranks, ALPHA, BETA, GAMMA) == names[1]


@pytest.mark.verifies(f"{C}:crossover")
@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        ("ring_all_reduce", "halving_doubling_all_reduce", inf),  # parallel lines
        ("ring_all_reduce", "ring_all_reduce", 0),
        ("ring_all_reduce", "parameter_server_all_reduce", 0),
        # Fewer messages and fewer bytes: never slower.
        ("halving_doubling_all_reduce", "parameter_server_all_reduce", 0),
        ("parameter_server_all_reduce", "halving_doubling_all_reduce", 0),
    ],
)
def test_lines_that_meet_at_no_size(first, second, size):
    assert crossover(first, second, 8, 1, 1) == size


# ------------------------------------------------------------- published figures


@pytest.mark.verifies(f"{N}:algorithm_bandwidth", f"{N}:bus_bandwidth")
def test_nccl_tests_bandwidths_of_eight_a100():
    size, seconds = 17_179_869_184, 127_997 * MICRO
    assert algorithm_bandwidth(size, seconds) / GB == pytest.approx(134.22, abs=0.005)
    measured = bus_bandwidth("all_reduce", size, seconds, 8)
    assert measured / GB == pytest.approx(234.89, abs=0.01)
    share = measured / Link.preset("nvlink3").bandwidth
    assert share == pytest.approx(0.78, abs=0.005)
    small = bus_bandwidth("all_reduce", 2**20, 101.9 * MICRO, 8)
    assert algorithm_bandwidth(2**20, 101.9 * MICRO) / GB == pytest.approx(
        10.29, abs=0.005
    )
    assert small / GB == pytest.approx(18.00, rel=1e-3)


@pytest.mark.verifies(f"{N}:bus_bandwidth_factor")
@pytest.mark.parametrize(
    ("algbw", "ranks", "busbw"), [(275.58, 8, 482.26), (47.32, 32, 91.69)]
)
def test_nccl_tests_bus_factor(algbw, ranks, busbw):
    factor = float(bus_bandwidth_factor("all_reduce", ranks))
    assert algbw * factor == pytest.approx(busbw, rel=2e-4)


@pytest.mark.verifies(f"{N}:bus_bandwidth_factor", f"{C}:collective_cost")
@pytest.mark.parametrize("ranks", [2, 3, 8, 32])
def test_bus_factors_are_the_ring_volumes(ranks):
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        cost = collective_cost(f"ring_{collective}", ranks)
        assert bus_bandwidth_factor(collective, ranks) == cost.volume
    assert bus_bandwidth_factor("broadcast", ranks) == 1
    assert bus_bandwidth_factor("all_reduce_in_network", ranks) < 1


def test_scaling_book_all_gather():
    size, link = 34e6, Link.preset("ici-v5p")
    around = size / link.bandwidth
    assert around / MICRO == pytest.approx(377, rel=0.01)
    unrounded = 2048 * 8192 * 2 / link.bandwidth
    assert unrounded / MICRO == pytest.approx(372.8, abs=0.05)
    # Four chips in a line: the ends pass three quarters on over one direction.
    in_a_line = 3 * 8.4e6 / (link.bandwidth / 2)
    assert in_a_line / MICRO == pytest.approx(560)


def test_scaling_book_tokens_per_chip():
    chip = Accelerator.preset("tpu-v5p")
    bound = chip.flops / (2 * chip.link.bandwidth)
    assert bound == 2550
    chips = 16e6 / (bound / 3)
    assert chips == pytest.approx(18_823, abs=1)
    days = 6 * 70e9 * 15e12 / (chips * chip.flops * 0.5) / 86_400
    assert days == pytest.approx(16.9, abs=0.05)


# ------------------------------------------------------------------- NCCL's tuner


@pytest.mark.verifies(f"{N}:bus_bandwidth_factor", f"{N}:nccl_all_reduce_time")
def test_nccl_ring_share_of_the_bus_is_one_over_the_bus_factor():
    rate = 100 * GB
    latency = nccl_all_reduce_time("ring", 0, 8, 1, rate, "Simple")
    size = 1e9
    moving = nccl_all_reduce_time("ring", size, 8, 1, rate, "Simple") - latency
    assert size / moving / rate == pytest.approx(
        1 / float(bus_bandwidth_factor("all_reduce", 8)), rel=1e-9
    )
    assert size / moving / rate == pytest.approx(0.5714, abs=5e-5)


@pytest.mark.verifies(f"{N}:nccl_all_reduce_time")
def test_nccl_latencies():
    """Of each protocol, added up by hand; a small message takes LL."""

    def latency(algorithm, ranks, nodes, protocol):
        found = nccl_all_reduce_time(algorithm, 0, ranks, nodes, GB, protocol)
        return found / MICRO

    assert latency("ring", 8, 1, "Simple") == pytest.approx(8.4 + 14 * 3.4)
    assert latency("ring", 64, 8, "Simple") == pytest.approx(8.4 + 112 * 3.4 + 14 * 14)
    assert latency("tree", 64, 8, "Simple") == pytest.approx(8.4 + 2 * (7 * 4 + 3 * 14))
    assert latency("ring", 64, 8, "LL") == pytest.approx(6.6 + 112 * 0.6 + 14 * 2.7)
    assert latency("tree", 64, 8, "LL") == pytest.approx(6.8 + 2 * (7 * 0.6 + 3 * 5))
    assert latency("ring", 64, 8, None) == pytest.approx(112, abs=0.5)
    assert latency("tree", 64, 8, None) == pytest.approx(45, abs=0.5)


@pytest.mark.verifies(f"{N}:nccl_all_reduce_time", f"{N}:nccl_protocol")
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (64, 8), (16, 2)])
def test_nccl_takes_the_fastest_protocol_of_each_size(algorithm, ranks, nodes):
    """LL for small messages, LL128 for middle ones, Simple for large ones."""
    rate, chosen = 100 * GB, []
    for size in (0, *(2**power for power in range(6, 35))):
        times = {
            name: nccl_all_reduce_time(algorithm, size, ranks, nodes, rate, name)
            for name in NCCL_PROTOCOLS
        }
        protocol = nccl_protocol(algorithm, size, ranks, nodes, rate)
        assert times[protocol] == min(times.values())
        fastest_time = nccl_all_reduce_time(algorithm, size, ranks, nodes, rate)
        assert fastest_time == times[protocol]
        chosen.append(protocol)
    assert list(dict.fromkeys(chosen)) == ["LL", "LL128", "Simple"]
    assert sorted(chosen, key=NCCL_PROTOCOLS.index) == chosen  # and never back


@pytest.mark.verifies(f"{N}:nccl_all_reduce_time")
def test_nccl_protocols_pay_for_latency_with_payload():
    """Half of what LL moves is flags, and 8 bytes of every 128 of LL128."""
    size, rate = 1e12, 100 * GB

    def share(algorithm, protocol, nodes):
        moving, latency = (
            nccl_all_reduce_time(algorithm, n, 8 * nodes, nodes, rate, protocol)
            for n in (size, 0)
        )
        whole = nccl_all_reduce_time(algorithm, size, 8 * nodes, nodes, rate, "Simple")
        whole -= nccl_all_reduce_time(algorithm, 0, 8 * nodes, nodes, rate, "Simple")
        return whole / (moving - latency)

    assert share("ring", "LL", 4) == pytest.approx(0.5)
    assert share("ring", "LL128", 4) == pytest.approx(0.92)
    assert share("tree", "LL", 4) == pytest.approx(1 / 3.8)
    assert share("tree", "LL128", 4) == pytest.approx(120 / 128)
    assert share("tree", "LL128", 1) == pytest.approx(7 / 9)


@pytest.mark.verifies(f"{N}:nccl_all_reduce_time")
def test_nccl_tree_hands_over_to_the_ring_at_213_megabytes():
    rate = 100 * GB
    size = 213e6
    ring = nccl_all_reduce_time("ring", size, 64, 8, rate)
    tree = nccl_all_reduce_time("tree", size, 64, 8, rate)
    assert ring == pytest.approx(tree, rel=1e-3)
    assert nccl_all_reduce_time("ring", 0.9 * size, 64, 8, rate) > (
        nccl_all_reduce_time("tree", 0.9 * size, 64, 8, rate)
    )


# ---------------------------------------------------------------------- hierarchy


@pytest.mark.verifies(f"{C}:hierarchical_time")
@given(powers, powers, bytes_)
def test_hierarchy_sends_the_slow_link_a_share_only(local, nodes, size):
    slow_beta = 20 * BETA
    time = hierarchical_time(size, local, nodes, (0, 0), (0, slow_beta))
    across = float(all_reduce_lower_bound(nodes)) * size / local * slow_beta
    assert time == pytest.approx(across, rel=1e-12)


@pytest.mark.verifies(f"{C}:collective_time", f"{C}:hierarchical_time")
def test_hierarchy_wins_where_the_links_between_nodes_are_slow():
    fast, slow = (ALPHA, 1 / 450e9), (ALPHA, 1 / 50e9)
    size, local, nodes = 2**30, 8, 8
    flat = collective_time("ring_all_reduce", size, local * nodes, *slow)
    layered = hierarchical_time(size, local, nodes, fast, slow)
    assert layered < flat / 3


@pytest.mark.verifies(
    f"{N}:bus_bandwidth_factor",
    f"{C}:collective_cost",
    f"{C}:collective_time",
    f"{N}:nccl_all_reduce_time",
)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collective_time("ring", 1, 2, 1, 1), "algorithm='ring' is not one of"),
        (lambda: collective_cost("ring_all_reduce", 0), "at least 1, got 0"),
        (lambda: bus_bandwidth_factor("ring", 2), "collective='ring' is not one of"),
        (lambda: nccl_all_reduce_time("star", 1, 8, 1, GB), "algorithm='star'"),
        (lambda: nccl_all_reduce_time("ring", 1, 8, 1, GB, "LL2"), "protocol='LL2'"),
        (lambda: nccl_all_reduce_time("ring", 1, 8, 3, GB), "8 ranks do not divide"),
    ],
)
def test_bad_questions_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.verifies(f"{C}:collective_cost")
@given(worlds)
@pytest.mark.parametrize("algorithm", sorted(COSTS))
def test_every_algorithm_answers_or_names_its_rule(algorithm, ranks):
    powers_only = algorithm.startswith(("recursive", "van_de"))
    if powers_only and ranks & (ranks - 1):
        with pytest.raises(ValueError, match=f"power of two, got {ranks} ranks"):
            collective_cost(algorithm, ranks)
    else:
        cost = collective_cost(algorithm, ranks)
        assert cost.messages > 0
        assert cost.volume > 0
