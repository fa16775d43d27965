"""Traffic of tensor parallelism: published volumes, and what real models send."""

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm import CommLedger
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.plan import LINKS, ModelShape, collective_traffic
from xtrain.plan.tensor_parallel import (
    bytes_sent,
    layer_calls,
    layer_flops,
    layer_seconds,
    partial_gradient_calls,
    tensor_parallel_calls,
    tokens_where_equal,
)

CALLS = "xtrain.plan.tensor_parallel:tensor_parallel_calls"
CALL = "xtrain.plan.tensor_parallel:TensorParallelCall"
PARTIAL = "xtrain.plan.tensor_parallel:partial_gradient_calls"
LAYER = "xtrain.plan.tensor_parallel:layer_calls"
BF16 = 2


def shape_of(hidden: int, heads: int, **changes) -> ModelShape:
    sizes = {
        "vocab_size": 51200,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
    }
    return ModelShape(**(sizes | changes))


GPT3 = shape_of(12288, 96)


@pytest.mark.verifies(LAYER)
def test_a_layer_of_gpt3_on_8_ranks_sends_what_the_papers_say():
    elements = bytes_sent(layer_calls(GPT3, 1, 2048, 8)) // BF16
    assert elements == 176_160_768
    assert (
        elements == 4 * collective_traffic("ring_all_reduce", 2048 * 12288, 8).max_sent
    )
    llama = ModelShape.preset("llama-3-70b")
    assert bytes_sent(layer_calls(llama, 1, 4096, 8)) == pytest.approx(470e6, rel=1e-3)


@pytest.mark.verifies(LAYER)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_eight_ten_and_twelve_activations_a_layer(ranks):
    """8 bsh (t-1)/t; 12 with recomputation; with SP 10."""
    shape = shape_of(96 * 48, 48, intermediate_size=48, vocab_size=48)
    sequence = 48
    unit = 2 * sequence * shape.hidden_size * BF16
    share = unit * (ranks - 1) // ranks
    options = {"batch": 2, "sequence": sequence, "ranks": ranks}
    assert bytes_sent(layer_calls(shape, **options)) == 8 * share
    assert bytes_sent(layer_calls(shape, **options, recompute=True)) == 12 * share
    split = layer_calls(shape, **options, sequence_parallel=True)
    assert bytes_sent(split) == 10 * share
    forward = bytes_sent([call for call in split if not call.backward])
    assert forward == 4 * share


@pytest.mark.verifies(CALLS)
def test_one_rank_sends_nothing_and_a_bad_cut_is_refused():
    assert tensor_parallel_calls(GPT3, 1, 8, 1) == []
    for ranks, options, message in (
        (5, {}, "num_attention_heads=96 is not divisible by 5 ranks"),
        (8, {"sequence_parallel": True}, "sequence=9 is not divisible by 8"),
        (0, {}, "ranks=0"),
    ):
        with pytest.raises(ValueError, match=message):
            tensor_parallel_calls(GPT3, 1, 9, ranks, **options)
    grouped = shape_of(96, 12, num_key_value_heads=4, vocab_size=60)
    with pytest.raises(ValueError, match="num_key_value_heads=4 and 6 ranks"):
        tensor_parallel_calls(grouped, 1, 8, 6)


@pytest.mark.verifies("xtrain.plan.tensor_parallel:layer_seconds")
def test_seconds_are_flops_over_the_rate_and_calls_over_the_link():
    calls = layer_calls(GPT3, 1, 2048, 8)
    flops = layer_flops(GPT3, 1, 2048)
    link = LINKS["nvlink4"]
    computing, sending = layer_seconds(calls, flops, 8, 1e12, 0.0, link.bandwidth)
    assert computing == pytest.approx(flops / 8e12)
    assert sending == pytest.approx(bytes_sent(calls) / link.bandwidth)
    late = layer_seconds(calls, flops, 8, 1e12, 1e-3, link.bandwidth)[1]
    assert late - sending == pytest.approx(4 * 2 * 7 * 1e-3)  # messages of 4 rings
    with pytest.raises(ValueError, match="bandwidth=0"):
        layer_seconds(calls, flops, 8, 1e12, 0.0, 0)


@pytest.mark.verifies("xtrain.plan.tensor_parallel:layer_flops")
def test_flops_of_a_layer_are_six_for_each_weight_and_attention():
    matrices = GPT3.layer_parameters - 2 * GPT3.hidden_size
    attention = 3 * 4 * 12288 * (2048 + 1) / 2
    assert layer_flops(GPT3, 1, 2048) == 2048 * (6 * matrices + attention)


@pytest.mark.verifies("xtrain.plan.tensor_parallel:tokens_where_equal")
def test_where_both_send_the_same_stage_3_and_tensor_parallelism_do():
    shape, ranks = shape_of(1024, 16), 4
    tokens = round(tokens_where_equal(shape))
    tensor = bytes_sent(layer_calls(shape, 1, tokens, ranks))
    weights = collective_traffic("ring_all_gather", shape.layer_parameters, ranks)
    stage_3 = 3 * BF16 * weights.max_sent
    assert tensor == pytest.approx(stage_3, rel=1e-3)
    assert bytes_sent(layer_calls(shape, 1, tokens // 2, ranks)) < stage_3


# ------------------------------------------------------------ against a real model


def counted(events, ranks: int) -> int:
    """Bytes this rank sent: its messages, and the share of what a backend ran."""
    total = 0
    for event in events:
        if event.kind == "send":
            total += event.nbytes
        elif event.kind == "collective":
            assert event.op == "allreduce", event.op
            half = collective_traffic("ring_all_reduce", event.payload // 4, ranks)
            total += 4 * half.sent[event.rank]
    return total


def bytes_and_calls(config: XtrainConfig, batch: int, sequence: int, split: bool):
    """Of forward and backward: bytes sent, and the payloads of the all-reduces."""
    ranks = torch.distributed.get_world_size()
    mesh = DeviceMesh("cpu", range(ranks), mesh_dim_names=("tensor",))
    model = XtrainModel(config, mesh, sequence_parallel=split)
    tokens = torch.arange(batch * sequence).view(batch, sequence) % config.vocab_size
    found = []
    with CommLedger() as forward:
        loss = model.loss(tokens, tokens)
    with CommLedger() as backward:
        loss.backward()
    with CommLedger() as once_a_step:
        model.sync_gradients()
    for ledger in (forward, backward, once_a_step):
        sums = Counter(e.payload // 4 for e in ledger.events if e.op == "allreduce")
        found.append((counted(ledger.events, ranks), sums))
    return found


@pytest.mark.verifies(CALLS, CALL, PARTIAL)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_real_model_sends_these_calls_forward_and_backward(
    world, xtrain_worlds, ranks
):
    if (xtrain_worlds.backend, xtrain_worlds.device) != ("gloo", "cpu"):
        pytest.skip("counts the messages sent over gloo")
    config = XtrainConfig(
        vocab_size=5 * ranks,
        hidden_size=12,
        intermediate_size=7 * ranks,
        num_hidden_layers=2,
        num_attention_heads=2 * ranks,
        num_key_value_heads=2 if ranks == 4 else ranks,  # on 4 ranks replicas
        head_dim=6,
    )
    for split in (False, True):
        batch, sequence = 3, (5 * ranks if split else 5)
        calls = tensor_parallel_calls(
            config, batch, sequence, ranks, sequence_parallel=split, itemsize=4
        )
        ways = [[c for c in calls if c.backward == way] for way in (False, True)]
        ways.append(partial_gradient_calls(config, 2, ranks, sequence_parallel=split))
        found = world(ranks).run(bytes_and_calls, config, batch, sequence, split)
        for rank, passes in enumerate(found):
            for mine, (sent, sums) in zip(ways, passes, strict=True):
                formula = sum(call.traffic.sent[rank % call.ranks] for call in mine)
                assert sent == formula, (ranks, split, rank, mine)
                assert sums == Counter(
                    call.numel for call in mine if call.algorithm == "ring_all_reduce"
                )
