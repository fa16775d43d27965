"""Seconds of a step: what they are made of, on which link, and what must hold."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan import (
    ACCELERATORS,
    EXACT,
    FITTED,
    RANGES,
    Accelerator,
    Assumptions,
    Estimator,
    Layout,
    ModelShape,
    estimate,
    hardware_flops,
    memory_per_device,
    nccl_hop_seconds,
    nodes_visited,
    pipeline_delay,
    pipeline_idle,
    traffic_per_step,
)
from xtrain.plan.kernels import Kernels
from xtrain.plan.pass_seconds import Pass
from xtrain.plan.transfer import Transfer, data_spans, once_to_a_node, split_spans
from xtrain.schedules import SCHEDULES, one_f_one_b, simulate, zb_h1, zb_h2

ESTIMATE = "xtrain.plan.estimate:estimate"
ESTIMATOR = "xtrain.plan.estimate:Estimator"
STEP = "xtrain.plan.step_seconds:StepSeconds"
KERNELS = "xtrain.plan.kernels:Kernels"
LINKS = "xtrain.plan.transfer:Links"
LLAMA = ModelShape.preset("llama-3-8b")
MIXTRAL = ModelShape.preset("mixtral-8x7b")
H100 = ACCELERATORS["h100"]
IDEAL = replace(H100, matmul=H100.flops, exponentials=None)
LOSSLESS = Assumptions(constants=EXACT, dtypes="zero16")


# ------------------------------------------------------------------ one device


@pytest.mark.verifies(ESTIMATE, KERNELS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_device_without_losses_is_flops_over_the_peak(recompute):
    layout = Layout(micro_batch=2, micro_batches=3, recompute=recompute)
    found = estimate(LLAMA, layout, IDEAL, 2048, constants=EXACT)
    flops = hardware_flops(LLAMA, 2048, 6, recompute, causal=True)
    # A fused backward computes the scores once more: five products for four.
    scores = hardware_flops(LLAMA, 2048, 6, "selective", causal=True)
    flops += (scores - hardware_flops(LLAMA, 2048, 6, causal=True)) / 2
    assert found.parts["compute"] == pytest.approx(flops / H100.flops)
    others = {name for name, spent in found.parts.items() if spent}
    assert others == {"compute", "optimizer"}
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_second == pytest.approx(6 * 2048 / found.seconds)
    ratio = hardware_flops(LLAMA, 2048, 1, recompute) / hardware_flops(LLAMA, 2048, 1)
    assert found.hfu / found.mfu == pytest.approx(ratio)
    low, high = found.range
    assert (low, high) == tuple(found.tokens_per_second * x for x in RANGES["dense"])


@pytest.mark.verifies(KERNELS)
@pytest.mark.parametrize("name", ["a100-80gb", "h100", "b200", "tpu-v6e", "mi300x"])
def test_a_product_is_a_roofline(name):
    """Large: the peak. One row: every element of the matrix crosses the bus once."""
    device = ACCELERATORS[name]
    kernels = Kernels(device, FITTED._replace(products=1.0, thin=1.0))
    large = 2 * 65536**3 / kernels.product(65536, 65536, 65536)
    best = device.matmul_efficiency or 0.8
    assert large == pytest.approx(best * device.flops, rel=0.03)
    row = kernels.product(1, 8192, 8192)
    assert row == pytest.approx(2 * 8192**2 / device.memory_bandwidth, rel=0.02)
    rates = [m / kernels.product(m, 4096, 4096) for m in (1, 8, 64, 512, 4096)]
    assert rates == sorted(rates)


@pytest.mark.verifies(KERNELS)
def test_the_kinds_of_attention_and_of_products():
    flash, older, unfused = (
        Kernels(H100, FITTED, attention=kind)
        for kind in ("flash", "older flash", "unfused")
    )
    pairs, head = 4096 * 32 * 2048, 128
    flops = 4 * head * pairs
    seconds = [one.attend(flops, pairs, head) for one in (flash, older, unfused)]
    assert seconds == sorted(seconds)
    more = flash.attend(flops, pairs, head, backward=True) - seconds[0]
    assert more == pytest.approx(
        1.5 * flops / flash.flash_rate
    )  # five products for two
    odd = unfused.attend(flops, pairs, 150)
    assert odd > 2 * seconds[2]  # 150 elements are not a multiple of 16 bytes
    fp8 = Kernels(H100, FITTED, "fp8")
    assert fp8.product(8192, 8192, 8192) < flash.product(8192, 8192, 8192)
    assert fp8.product(8, 8192, 8192) > flash.product(8, 8192, 8192)  # casts
    assert fp8.product(64, 64, 64, half=True) == flash.product(64, 64, 64)
    with pytest.raises(ValueError, match="a100-80gb has no fp8 products"):
        Kernels(ACCELERATORS["a100-80gb"], FITTED, "fp8")
    with pytest.raises(ValueError, match="precision='fp6' is not one of"):
        Kernels(H100, FITTED, "fp6")
    with pytest.raises(ValueError, match="attention='x' is not one of"):
        Kernels(H100, FITTED, attention="x")


@pytest.mark.verifies(ESTIMATE)
def test_small_models_are_bound_by_the_host():
    tiny = ModelShape(vocab_size=1024, hidden_size=64, intermediate_size=256,
                      num_hidden_layers=4, num_attention_heads=4)  # fmt: skip
    found = estimate(tiny, Layout(), "h100", 16)
    kernels = 3 * (4 * 40 + 20) * FITTED.launch
    assert found.parts["compute"] == pytest.approx(kernels, rel=0.05)


# ---------------------------------------------------------------------- links


@pytest.mark.verifies(LINKS)
@pytest.mark.parametrize(
    ("spans", "nodes", "local"),
    [
        (((1, 8),), 1, 8),
        (((1, 16),), 2, 8),
        (((2, 4),), 1, 4),
        (((4, 16),), 8, 2),
        (((8, 4),), 4, 1),
        (((1, 2), (16, 4)), 4, 2),  # context ranks inside, data ranks across
        (((2, 4), (8, 3)), 3, 4),
        (((1, 3),), 1, 3),
    ],
)
def test_where_a_group_stands(spans, nodes, local):
    assert Estimator(LLAMA, "h100", 64).links.nodes(spans) == (nodes, local)


@pytest.mark.verifies(LINKS)
@pytest.mark.parametrize(
    ("sizes", "axis", "ranks", "rate"),
    [
        ({"tensor": 8}, "tensor", 8, 450e9),
        ({"tensor": 16}, "tensor", 16, 400e9),  # 8 adapters of 50 GB/s
        ({"tensor": 2, "context": 4}, "context", 4, 450e9),
        ({"tensor": 4, "context": 4}, "context", 4, 100e9),  # 8 / 4 adapters
    ],
)
def test_a_ring_uses_the_adapters_of_its_ranks(sizes, axis, ranks, rate):
    """2 (n - 1)/n of the bytes, on NVLink or on adapters, and never above NVLink."""
    links = Estimator(LLAMA, "h100", 2048, LOSSLESS).links
    transfer = Transfer(axis, "x", "ring_all_reduce", 10**12, ranks)
    expected = 2 * (ranks - 1) / ranks * 1e12 / rate
    assert links.seconds(Layout(**sizes), transfer) == pytest.approx(expected, rel=1e-3)
    fast = replace(H100, network=replace(H100.network, bandwidth=100e9))
    found = Estimator(LLAMA, fast, 8, LOSSLESS).links
    transfer = replace(transfer, axis="tensor", ranks=16)
    expected = 2 * 15 / 16 * 1e12 / 450e9
    wide = Layout(tensor=16)
    assert found.seconds(wide, transfer) == pytest.approx(expected, rel=1e-3)


@pytest.mark.verifies(LINKS)
def test_gradients_are_summed_over_data_and_context():
    """Context ranks of a node are near, so their part of the ring is, too."""
    layout = Layout(context=8, data=4, zero=1, shard_context=True)
    assert data_spans(layout, experts=False) == ((1, 8), (8, 4))
    estimator = Estimator(LLAMA, "h100", 2048, LOSSLESS)
    assert estimator.links.nodes(data_spans(layout, False)) == (4, 8)
    alone = Layout(context=8, zero=3, shard_context=True)  # one data rank
    data = [one for one in traffic_per_step(LLAMA, alone, 2048) if one.axis == "data"]
    assert {one.ranks for one in data} == {8} and len(data) == 3
    apart = Layout(tensor=8, data=8)
    assert estimator.links.nodes(data_spans(apart, False)) == (8, 1)
    experts = Layout(data=8, expert=4, context=2)
    assert data_spans(experts, experts=True) == ((1, 2), (8, 2))
    folded = Layout(data=4, tensor=2, expert=8, expert_tensor=1)
    assert data_spans(folded, experts=True) == ((8, 1),)


@pytest.mark.verifies(LINKS)
def test_hybrid_sharding_gathers_inside_a_node():
    """Shards on 8 neighbours: gathers over NVLink, an eighth is summed across."""
    whole = Layout(data=64, zero=3)
    hybrid = replace(whole, replicate=8)
    assert (hybrid.shard_ranks, whole.shard_ranks) == (8, 64)
    near, far = split_spans(data_spans(hybrid, False), 8)
    links = Estimator(LLAMA, "h100", 2048).links
    assert links.nodes(near) == (1, 8) and links.nodes(far) == (8, 1)
    seconds = {}
    for layout in (whole, hybrid):
        for one in traffic_per_step(LLAMA, layout, 2048):
            key = layout.replicate, one.algorithm
            seconds[key] = seconds.get(key, 0) + links.seconds(layout, one)
    assert seconds[8, "ring_all_gather"] < seconds[1, "ring_all_gather"]
    assert (8, "ring_all_reduce") in seconds and (1, "ring_all_reduce") not in seconds
    held = memory_per_device(LLAMA, hybrid, 2048).states
    assert held == pytest.approx(8 * memory_per_device(LLAMA, whole, 2048).states)


@pytest.mark.verifies("xtrain.plan.transfer:once_to_a_node", LINKS)
@given(st.integers(2, 16), st.integers(1, 8))
def test_a_tokens_copies_for_one_node_cross_once(nodes, copies):
    """Close to the exact count of `nodes_visited`, where experts are many."""
    found = once_to_a_node(copies, nodes)
    assert found == pytest.approx(nodes_visited(64 * nodes, copies, nodes), rel=0.03)
    assert 1 - 1e-9 <= found <= min(nodes, copies) + 1e-9


@pytest.mark.verifies(LINKS)
def test_the_host_count_of_a_rack_means_the_rack():
    for given_count, joined in ((None, 72), (4, 72), (36, 36), (8, 8)):
        assumed = Assumptions(gpus_per_node=given_count)
        assert Estimator(LLAMA, "gb200", 64, assumed).links.gpus_per_node == joined
    assert Estimator(LLAMA, "h100", 64).links.gpus_per_node == 8
    pod = Estimator(LLAMA, "tpu-v5p", 64, LOSSLESS).links
    assert pod.inside == 6 * 90e9
    small = Assumptions(gpus_per_node=8)
    with pytest.raises(ValueError, match="tpu-v5p has no network"):
        estimate(LLAMA, Layout(tensor=16), "tpu-v5p", 64, **small._asdict())


@pytest.mark.verifies(LINKS)
def test_a_tree_where_a_ring_has_more_hops():
    links = Estimator(LLAMA, "h100", 64).links
    near, far = nccl_hop_seconds(False), nccl_hop_seconds(True)
    gather, reduce = "ring_all_gather", "ring_all_reduce"
    assert links.latency("send", 2, 1) == near and links.latency("send", 2, 2) == far
    assert links.latency(gather, 8, 1) == pytest.approx(7 * near)
    ring = 63 * far + 448 * near  # NCCL has a tree for the all-reduce alone
    assert links.latency(gather, 512, 64) == pytest.approx(ring)
    assert links.latency(reduce, 512, 64) == pytest.approx(2 * (6 * far + 7 * near))
    assert links.latency(reduce, 8, 1) == pytest.approx(2 * 7 * near)


@pytest.mark.verifies(LINKS)
def test_a_call_across_nodes_takes_its_time():
    layout = Layout(data=16)
    for kind in ("ring_all_reduce", "all_to_all", "send"):
        found = []
        for call in (0.0, 1e-3):
            constants = EXACT._replace(call=call)
            links = Estimator(LLAMA, "h100", 64, Assumptions(constants=constants)).links
            one, inside = (
                Transfer("data", "x", kind, 10**6, ranks, 3, spans=((1, ranks),))
                for ranks in (16, 8)
            )
            found += [links.seconds(layout, one), links.seconds(layout, inside)]
        assert found[2] - found[0] == pytest.approx(3e-3)
        if kind != "send":
            assert found[3] == found[1]


# ----------------------------------------------------- what hides behind compute


@pytest.mark.verifies(ESTIMATOR, STEP)
def test_gradients_hide_behind_the_last_backward():
    shown = {}
    for overlap in (True, False):
        assumed = LOSSLESS._replace(overlap=overlap)
        estimator = Estimator(LLAMA, "h100", 256, assumed)
        layout = Layout(data=16, zero=1)
        one = estimator.rank_pass(layout, 0)
        layers = LLAMA.num_hidden_layers
        gather, scatter = (
            estimator.links.seconds(layout, transfer, calls=layers + 1)
            for transfer in traffic_per_step(LLAMA, layout, 256, dtypes="zero16")
        )
        shown[overlap] = estimator.estimate(layout).parts["data"]
        left = gather - min(gather * layers / (layers + 1), one.forward)
        window = one.seconds - one.forward
        left += scatter - min(scatter * layers / (layers + 1), window)
        assert shown[overlap] == pytest.approx(left if overlap else gather + scatter)
    assert 0 < shown[True] < shown[False]  # too few tokens to hide all of it


@pytest.mark.verifies(ESTIMATOR, STEP)
@pytest.mark.parametrize(("zero", "gathers"), [(2, (1, 0)), (3, (4, 4))])
def test_every_micro_batch_hides_a_collective_of_its_own(zero, gathers):
    """4 micro-batches on 16 ranks: 15/16 of 2 bytes a weight through 8 adapters."""
    estimator = Estimator(LLAMA, "h100", 256, LOSSLESS)
    layout = Layout(data=16, zero=zero, micro_batches=4)
    wait = 33 * estimator.links.latency(
        "ring_all_gather", 16, 2
    )  # 32 layers and the rest
    once = wait + 15 / 16 * 2 * LLAMA.parameters / 400e9
    one = Pass(0.01, 0.012, 0.008, 0.0, 0.0, 0.0)
    forward, backward = (times * once for times in gathers)
    expected = forward - gathers[0] * 0.01  # the window of each gather is a forward
    if zero == 3:  # gathers and scatters of backward share its window
        expected += backward + 4 * once - 4 * 0.02
    else:
        expected += 4 * once - 4 * 0.02
    assert estimator.data_seconds(layout, one) == pytest.approx(expected)
    long = Pass(9.0, 9.0, 9.0, 0.0, 0.0, 0.0)
    edge = forward + backward + 4 * once  # the first layer's has nothing to hide it
    assert estimator.data_seconds(layout, long) == pytest.approx(edge / 33)


@pytest.mark.verifies(ESTIMATOR, "xtrain.plan.pass_seconds:PassTimes")
def test_a_ring_hides_behind_its_blocks_and_an_exchange_does_not():
    """Long sequences compute longer than they send: hidden by the ring alone."""
    spent = {}
    for way in ("ring", "all_gather"):
        for sequence in (1024, 524_288):
            layout = Layout(context=8, context_way=way)
            found = estimate(LLAMA, layout, "h100", sequence)
            spent[way, sequence] = found.parts["context"]
    hidden = FITTED.interference * 1.2  # a ring's gradients go once more round
    assert spent["ring", 524_288] < hidden * spent["all_gather", 524_288]
    assert 0 < spent["ring", 1024] <= spent["all_gather", 1024]
    assert spent["all_gather", 524_288] > spent["all_gather", 1024]


@pytest.mark.verifies("xtrain.plan.pass_seconds:PassTimes")
def test_pairs_of_dualpipe_hide_the_exchange():
    plain = Layout(pipeline=4, data=8, expert=8, micro_batches=16)
    pairs = replace(plain, schedule="dualpipe")
    found = [estimate(MIXTRAL, one, "h100", 4096) for one in (plain, pairs)]
    assert found[0].parts["expert"] > 0 == found[1].parts["expert"]


@pytest.mark.verifies(ESTIMATOR, STEP)
def test_the_bubble_waits_for_the_other_ranks():
    """1F1B: the slowest rank waits once for each other rank's forward and backward."""
    layout = Layout(pipeline=4, micro_batches=16)
    estimator = Estimator(LLAMA, "h100", 2048)
    found = estimator.estimate(layout)
    passes = [estimator.rank_pass(layout, rank) for rank in range(4)]
    slowest = max(passes, key=lambda one: one.seconds)
    assert slowest is passes[3]  # it has the head
    others = sum(one.seconds for one in passes) - slowest.seconds
    assert found.parts["bubble"] == pytest.approx(others)
    assert found.parts["compute"] == pytest.approx(16 * slowest.seconds)
    finer = replace(layout, schedule="interleaved", chunks=2)
    assert estimator.estimate(finer).parts["bubble"] == pytest.approx(others / 2)


@pytest.mark.verifies("xtrain.plan.bubble:pipeline_delay")
@pytest.mark.parametrize(
    ("count", "times", "p2p", "rates"),
    [  # Qi et al., 2024, table 5: 1.5B on 8 ranks
        (24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
        (32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0837)),
        (64, (18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0444)),
    ],
)
def test_messages_add_what_the_simulation_shows(count, times, p2p, rates):
    names = ("one_f_one_b", "zb_h1", "zb_h2")
    for name, make, rate in zip(names, (one_f_one_b, zb_h1, zb_h2), rates, strict=True):
        work = count * sum(times)
        cost = (
            work + pipeline_idle(name, 8, *times) + pipeline_delay(name, 8, count, p2p)
        )
        assert (cost - work) / cost == pytest.approx(rate, abs=1.5e-4)
        played = simulate(make(8, count), *times, p2p=p2p)
        idle = max(played.idle)
        assert idle / (work + idle) == pytest.approx(rate, abs=1.5e-4)
    assert pipeline_delay("gpipe", 1, 8, p2p) == 0


# ------------------------------------------------------------ for any layout

LAYOUTS = st.builds(
    Layout,
    data=st.sampled_from([1, 2, 8]),
    tensor=st.sampled_from([1, 2, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    zero=st.integers(0, 1),
    sequence_parallel=st.booleans(),
    micro_batches=st.integers(1, 9),
    recompute=st.sampled_from(["none", "selective", "full"]),
)


@pytest.mark.verifies(ESTIMATE, ESTIMATOR)
@given(LAYOUTS, st.sampled_from(["llama-3-8b", "mixtral-8x7b", "gpt-3-175b"]))
def test_for_any_layout(layout, name):
    shape = ModelShape.preset(name)
    if shape.vocab_size % 8:
        layout = replace(layout, tensor=1)
    found = estimate(shape, layout, "h100", 2048)
    assert found.seconds > 0 and min(found.parts.values()) >= 0
    assert 0 < found.causal_mfu < found.mfu <= found.hfu
    # More of anything is never slower.
    for better in (
        replace(H100, flops=2 * H100.flops, matmul=2 * H100.matmul),
        replace(H100, memory_bandwidth=2 * H100.memory_bandwidth),
        replace(H100, link=replace(H100.link, bandwidth=2 * H100.link.bandwidth)),
        replace(H100, network=replace(H100.network, bandwidth=1e11)),
        replace(H100, exponentials=2 * H100.exponentials),
    ):
        assert estimate(shape, layout, better, 2048).seconds <= 1.0001 * found.seconds
    # Of all pipeline ranks none needs more than the one that is shown.
    most = max(
        memory_per_device(shape, layout, 2048, rank=rank).total
        for rank in range(layout.pipeline)
    )
    assert found.memory.total == most
    # Terms that another layout has left behind change nothing.
    shared = Estimator(shape, Accelerator.preset("h100"), 2048)
    shared.estimate(replace(layout, micro_batches=11, data=4))
    shared.estimate(replace(layout, recompute="full"))
    assert shared.estimate(layout) == found


@pytest.mark.verifies(ESTIMATE)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 3),
       st.sampled_from([None, 1]))  # fmt: skip
def test_experts_estimated_for_any_layout(expert, tensor, zero, cut):
    layout = Layout(data=4, expert=expert, tensor=tensor, zero=zero, expert_tensor=cut)
    found = estimate(MIXTRAL, layout, "h100", 2048)
    assert (found.parts["expert"] > 0) is (expert > 1)
    assert found.memory.total == memory_per_device(MIXTRAL, layout, 2048).total
    shared = Estimator(MIXTRAL, "h100", 2048)
    shared.estimate(replace(layout, expert_tensor=tensor))
    assert shared.estimate(layout) == found


@pytest.mark.verifies(ESTIMATE)
def test_folded_experts_are_whole_on_ranks_of_all_axes():
    """8 experts on 2 x 4 ranks: one each, whole; every rank sends its own tokens."""
    folded = Layout(data=4, tensor=2, expert=8, expert_tensor=1, sequence_parallel=True)
    plain = replace(folded, expert=4, expert_tensor=None)
    held = [Estimator(MIXTRAL, "h100", 64).held(one, 0) for one in (folded, plain)]
    assert held[0].experts == held[1].experts  # 8 of 8 ranks, or 4 x 2
    sent = [
        sum(one.sent for one in traffic_per_step(MIXTRAL, layout, 2048)
            if one.axis == "expert")
        for layout in (folded, plain)
    ]  # fmt: skip
    assert sent[0] / sent[1] == pytest.approx((7 / 8 / 2) / (3 / 4))
    wide = ModelShape.preset("deepseek-v3")
    with pytest.raises(ValueError, match="expert=16 x expert_tensor=1 does not divide"):
        estimate(wide, replace(folded, expert=16), "h100", 64)


@pytest.mark.verifies(ESTIMATE, ESTIMATOR)
@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        (Layout(tensor=3), {}, "heads: num_attention_heads=32"),
        (Layout(pipeline=2, data=2, zero=3), {}, "zero-with-pipeline"),
        (Layout(data=4, zero=3, replicate=3), {}, "replicate=3 does not divide the 4"),
        (Layout(data=4, replicate=2), {}, "replicate=2 with zero=0: no shards"),
        (Layout(), {"accelerator": "h900"}, "unknown accelerator 'h900'"),
        (Layout(), {"sequence": 0}, "sequence=0"),
        (Layout(), {"precision": "fp6"}, "precision='fp6' is not one of"),
        (Layout(), {"attention": "x"}, "attention='x' is not one of flash"),
        (Layout(), {"network": -1}, "network=-1"),
        (Layout(), {"formula": "x"}, "formula='x'"),
        (Layout(), {"gpus_per_node": 0}, "gpus_per_node=0"),
        (Layout(), {"recipe": "x"}, "recipe='x'"),
        (Layout(), {"dtypes": "x"}, "dtypes='x'"),
        (Layout(), {"capacity": 0}, "capacity=0 is not"),
        (Layout(), {"capacity": float("inf")}, "capacity=inf"),
        (Layout(), {"reserve": -1}, "reserve=-9.31323e-10 GiB is not from 0"),
        (Layout(), {"reserve": float("nan")}, "reserve=nan"),
        (Layout(), {"reserve": 80e9}, "is not from 0 to below the device's 74.5"),
    ],
)
def test_bad_input(layout, options, said):
    arguments = {"accelerator": "h100", "sequence": 64} | options
    with pytest.raises(ValueError, match=re.escape(said)):
        estimate(LLAMA, layout, **arguments)


@pytest.mark.verifies(ESTIMATE)
def test_stages_2_and_3_with_a_pipeline_behind_a_flag():
    layout = Layout(pipeline=2, data=2, zero=3)
    found = estimate(LLAMA, layout, "h100", 64, sharded_pipeline=True)
    assert found.seconds > 0


# ---------------------------------------------------- single terms, by hand


@pytest.mark.verifies(ESTIMATOR, STEP)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_optimizer_reads_and_writes_its_share_once(zero):
    """4 + 8 bytes of fp32 state both ways, 4 of gradients in, 2 of weights out."""
    layout = Layout(data=8, zero=zero)
    found = Estimator(LLAMA, "h100", 256).optimizer_seconds(layout)
    share = LLAMA.parameters / (8 if zero else 1)
    assert found == pytest.approx(share * (2 * 12 + 4 + 2) / 3.35e12)


@pytest.mark.verifies(ESTIMATOR)
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("one_f_one_b", 1), ("interleaved", 2), ("zb_v", 2), ("dualpipe", 1),
     ("dualpipe_v", 2)],
)  # fmt: skip
def test_the_bubble_is_the_simulated_idle_time_of_parts_of_a_rank(name, chunks):
    """A rank's pass takes 6: with two stages on a rank each of them takes half."""
    layout = Layout(pipeline=4, micro_batches=8, schedule=name, chunks=chunks)
    one = Pass(2, 2, 2, 0, 0, 0)
    parts = Estimator(LLAMA, "h100", 256).seconds(layout, [one] * 4)
    schedule = SCHEDULES[name](4, 8)
    part = 2.0 if name == "one_f_one_b" else 1.0
    played = simulate(schedule, part, part, part)
    assert played.work == (24 if name == "dualpipe" else 48)  # 4 + 4 each way, or 8
    assert parts["bubble"] == pytest.approx(max(played.idle))
    assert parts["compute"] == pytest.approx(played.work)
