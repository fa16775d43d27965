"""Mixture of experts by formula: published figures, identities, and real tensors."""

import itertools
import math

import pytest
import torch

from xtrain.plan import (
    Accelerator,
    Link,
    all_to_all_bandwidth,
    all_to_all_bytes,
    balance_loss,
    bytes_between_nodes,
    copy_bytes,
    expert_capacity,
    expert_memory,
    experts_for_free,
    hiding_width,
    nodes_visited,
    overlap_speedup,
    routed_bytes,
)
from xtrain.plan.experts import ExpertMemory, expert_seconds

PLAN = "xtrain.plan.experts"
GB = 1e9


# ------------------------------------------------------------------------- bytes


@pytest.mark.verifies(f"{PLAN}:copy_bytes", f"{PLAN}:all_to_all_bandwidth")
@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine", "published"),
    [
        (8, 77, 114, (98, 127)),
        (16, 118, 195, (63, 74)),
        (32, 155, 273, (48, 53)),
        (64, 173, 314, (43, 46)),
        (128, 192, 369, (39, 39)),
        (256, 194, 360, (39, 40)),
    ],
)
def test_bandwidths_of_deepeps_table(ranks, dispatch, combine, published):
    """128 tokens of 7168, 8 experts each, fp8 there and bf16 back; microseconds.

    Its test masks about one slot in a hundred, which the formula counts.
    """
    copies = (copy_bytes(7168, "fp8"), copy_bytes(7168))
    assert copies == (7408, 14336)
    for copy, micro, printed in zip(
        copies, (dispatch, combine), published, strict=True
    ):
        bandwidth = all_to_all_bandwidth(128, 8, copy, micro * 1e-6) / 1e9
        assert printed < bandwidth < printed * 1.021


@pytest.mark.verifies(f"{PLAN}:copy_bytes")
def test_bytes_of_a_copy():
    assert copy_bytes(130, "fp8") == 130 + 2 * 4 + 16
    assert copy_bytes(130, "fp32") == 520
    with pytest.raises(ValueError, match="dtype='int8' is not one of fp8, bf16, fp32"):
        copy_bytes(8, "int8")


@pytest.mark.verifies(f"{PLAN}:all_to_all_bytes", f"{PLAN}:routed_bytes")
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_uniform_routing_sends_all_but_one_part_of_the_copies(ranks, itemsize):
    tokens, top_k, hidden = 16, 2, 32
    each = tokens * top_k // ranks
    sent = routed_bytes([[each] * ranks] * ranks, hidden, itemsize=itemsize)
    by_formula = all_to_all_bytes(tokens, top_k, hidden, ranks, itemsize=itemsize)
    assert sent == [by_formula] * ranks
    per_token = top_k * hidden * itemsize * (ranks - 1) / ranks
    assert by_formula == tokens * per_token


@pytest.mark.verifies(f"{PLAN}:routed_bytes")
def test_bytes_of_a_table_of_copies_are_those_of_tensors():
    copies = [[3, 0, 5], [1, 4, 2], [0, 0, 7]]
    rows = [
        [torch.zeros(count, 6, dtype=torch.float64) for count in row] for row in copies
    ]
    for table, held in ((copies, rows), ([*zip(*copies)], [*zip(*rows)])):  # noqa: B905
        expected = [
            sum(x.nbytes for peer, x in enumerate(row) if peer != rank)
            for rank, row in enumerate(held)
        ]
        assert routed_bytes(table, 6, itemsize=8) == expected
    assert routed_bytes(copies, 6, itemsize=8) == [240, 144, 0]
    with pytest.raises(ValueError, match="3 rows, but one names 2 ranks"):
        routed_bytes([[1, 2, 3], [1, 2], [1, 2, 3]], 6)
    with pytest.raises(ValueError, match="copies=-1"):
        routed_bytes([[-1]], 6)


# -------------------------------------------------------------------------- nodes


@pytest.mark.verifies(f"{PLAN}:bytes_between_nodes")
def test_a_token_of_deepseek_v3_crosses_to_3_and_a_half_nodes():
    expected, most = bytes_between_nodes(7168, 8, 4, itemsize=1)
    assert expected == 3.5 * 7168
    assert most == 4 * 7168
    assert bytes_between_nodes(7168, 8, 8, itemsize=1) == (7 * 7168, 7 * 7168)
    assert bytes_between_nodes(10, 1, 1) == (0, 0)
    # counted: every choice of 3 of 5 nodes, the token's own is number 0
    choices = list(itertools.combinations(range(5), 3))
    crossings = [sum(node != 0 for node in chosen) for chosen in choices]
    expected, most = bytes_between_nodes(1, 5, 3, itemsize=1)
    assert expected == pytest.approx(sum(crossings) / len(crossings))
    assert most == max(crossings)
    with pytest.raises(ValueError, match="node_limit=3 is above nodes=2"):
        bytes_between_nodes(1, 2, 3)


@pytest.mark.verifies(f"{PLAN}:nodes_visited")
def test_nodes_of_a_token_without_a_limit():
    choices = list(itertools.combinations(range(8), 3))
    visited = [len({expert // 2 for expert in chosen}) for chosen in choices]
    assert nodes_visited(8, 3, 4) == pytest.approx(sum(visited) / len(visited))
    assert nodes_visited(8, 1, 4) == 1
    assert nodes_visited(8, 8, 4) == 4
    # 256 experts on 8 nodes, 8 of them: the limit of 4 takes away a third
    assert nodes_visited(256, 8, 8) == pytest.approx(5.29, abs=0.005)
    with pytest.raises(ValueError, match="num_experts=8 is not a multiple of nodes=3"):
        nodes_visited(8, 2, 3)


@pytest.mark.verifies(f"{PLAN}:experts_for_free")
def test_deepseek_v3_could_choose_13_experts_at_the_same_cost():
    each, all_nodes = experts_for_free(160 * GB, 50 * GB, 4)
    assert each == pytest.approx(3.2)
    assert all_nodes == pytest.approx(12.8)
    assert round(all_nodes) == 13


# ----------------------------------------------------------------------- capacity


@pytest.mark.verifies(f"{PLAN}:expert_capacity")
def test_capacity():
    # Megatron's test of its router: 32 tokens, 2 of 4 experts
    assert 4 * expert_capacity(32, 4, 2, 1.0) == 64
    assert 4 * expert_capacity(32, 4, 2, 2.0) == 128
    assert expert_capacity(10, 4, 1, 1.0) == 3
    assert expert_capacity(0, 4, 1, 1.0) == 0
    # 100 x 1.1 is 110.00000000000001 in floats
    assert math.ceil(100 * 1.1) == 111
    assert expert_capacity(100, 1, 1, 1.1) == 110
    assert expert_capacity(2048, 64, 8, 1.25) == 320
    for bad in ({"top_k": 5}, {"capacity_factor": 0.0}, {"tokens": -1}):
        given = {"tokens": 8, "num_experts": 4, "top_k": 2, "capacity_factor": 1.0}
        with pytest.raises(ValueError, match=next(iter(bad))):
            expert_capacity(**(given | bad))


# ------------------------------------------------------------------------ balance


@pytest.mark.verifies(f"{PLAN}:balance_loss")
def test_identities_of_the_balance_loss():
    for experts in (2, 4, 64):
        uniform = [1 / experts] * experts
        assert balance_loss([7] * experts, uniform) == pytest.approx(1)
        collapsed = [1.0] + [0.0] * (experts - 1)
        assert balance_loss(collapsed, collapsed) == experts
    assert balance_loss([2, 1, 1, 0], [0.5, 0.25, 0.25, 0]) == 1.5
    assert balance_loss([6] * 4, [0.25] * 4, top_k=2) == pytest.approx(1)
    assert balance_loss([6] * 4, [0.25] * 4, top_k=2, per="token") == pytest.approx(2)
    with pytest.raises(ValueError, match="4 counts and 3 probabilities"):
        balance_loss([1] * 4, [1 / 3] * 3)
    with pytest.raises(ValueError, match="per='expert' is not one of copy, token"):
        balance_loss([1], [1.0], per="expert")
    with pytest.raises(ValueError, match="the sum of counts=0"):
        balance_loss([0, 0], [0.5, 0.5])


@pytest.mark.verifies(f"{PLAN}:balance_loss")
def test_the_two_conventions_are_megatrons_and_those_of_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(0)
    logits_TE = torch.randn(50, 8, dtype=torch.float64)
    scores_TE = logits_TE.softmax(-1)
    counts = torch.bincount(scores_TE.topk(3).indices.flatten(), minlength=8).tolist()
    mean = scores_TE.mean(0).tolist()
    theirs = mixtral.load_balancing_loss_func((logits_TE,), 8, 3).item()
    assert balance_loss(counts, mean, top_k=3, per="token") == pytest.approx(theirs)
    # Megatron: E / (k T T) x sum over experts of counts and summed scores
    summed = zip(counts, scores_TE.sum(0).tolist(), strict=True)
    megatron = 8 / (3 * 50 * 50) * sum(n * p for n, p in summed)
    assert balance_loss(counts, mean, top_k=3) == pytest.approx(megatron)


# ------------------------------------------------------------------------- memory


@pytest.mark.verifies(f"{PLAN}:expert_memory", f"{PLAN}:ExpertMemory")
def test_routed_experts_of_deepseek_v3():
    """58 layers of 256 experts; 2048 GPUs, 64 expert ranks, 16 stages."""
    sizes = (7168, 2048, 256, 58)
    whole = expert_memory(*sizes)
    assert whole.parameters == 653_908_770_816
    assert whole.replicas == 1
    own = expert_memory(*sizes, world=2048, expert=64, pipeline=16)
    assert own.replicas == 2
    assert own.parameters == pytest.approx(0.64e9, rel=0.005)
    assert own.optimizer_parameters == own.parameters / 2
    assert own.parameters * 1024 == whole.parameters
    halved = expert_memory(*sizes, world=2048, expert=32, tensor=2, pipeline=16)
    assert halved == own
    with pytest.raises(ValueError, match="world=12 is not a multiple of"):
        expert_memory(*sizes, world=12, expert=8)
    with pytest.raises(ValueError, match="not a multiple of expert=3"):
        expert_memory(*sizes, world=3, expert=3)


@pytest.mark.verifies(f"{PLAN}:expert_memory")
def test_parameters_are_those_of_real_tensors():
    gate = torch.empty(8, 16, 4)
    down = torch.empty(8, 4, 16)
    found = expert_memory(4, 16, 8, 3)
    assert found == ExpertMemory(3 * (2 * gate.numel() + down.numel()), 1, 4608 * 1.0)


# ------------------------------------------------------------------------ overlap


@pytest.mark.verifies(f"{PLAN}:expert_seconds", f"{PLAN}:hiding_width")
def test_width_at_which_products_hide_the_all_to_alls():
    flops, link = Accelerator.preset("h100").flops, Link.preset("infiniband-ndr")
    width = hiding_width(flops, link.bandwidth, 64, dispatch=1, combine=2)
    assert width == pytest.approx(3 * 63 / 64 / 6 * flops / 50e9)
    for hidden, top_k in ((7168, 8), (512, 1)):
        at = expert_seconds(
            hidden, round(width), top_k, 64,
            flops=flops, bandwidth=link.bandwidth, dispatch=1, combine=2,
        )  # fmt: skip
        assert at[0] == pytest.approx(at[1], rel=1e-3)
    # DeepSeek-V3's experts are 2048 wide: narrower than that, so attention must help
    assert width > 2048
    assert hiding_width(1.0, 1.0, 1) == 0
    assert hiding_width(1.0, 1.0, 2) == pytest.approx(4 * 0.5 / 6)
    compute, sent = expert_seconds(2, 3, 5, 4, flops=1.0, bandwidth=1.0)
    assert compute == 2 * 3 * (2 * 3) * 5  # three products, two FLOPs an element
    assert sent == 2 * all_to_all_bytes(1, 5, 2, 4)


@pytest.mark.verifies(f"{PLAN}:overlap_speedup")
def test_overlap_gains_most_where_both_take_as_long():
    assert overlap_speedup(1.0, 1.0) == 2
    assert overlap_speedup(1.0, 0.5) == overlap_speedup(0.5, 1.0) == 1.5
    assert overlap_speedup(3.0, 0) == 1
    with pytest.raises(ValueError, match="communication=-1"):
        overlap_speedup(1.0, -1)
