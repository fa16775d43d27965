"""Bytes of a step by axis: published volumes, dtypes, and collectives counted anew."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan import (
    DTYPES,
    Layout,
    ModelShape,
    Transfer,
    TransferDtypes,
    collective_traffic,
    context_bytes,
    device_parameters,
    sent_by_axis,
    traffic_per_step,
)
from xtrain.plan.experts import all_to_all_bytes
from xtrain.plan.step_traffic import layer_transfers
from xtrain.plan.tensor_parallel import (
    bytes_sent,
    partial_gradient_calls,
    tensor_parallel_calls,
)
from xtrain.plan.transfer import dtypes_of

TRAFFIC = "xtrain.plan.step_traffic:traffic_per_step"
TRANSFER = "xtrain.plan.transfer:Transfer"
LLAMA = ModelShape.preset("llama-3-8b")
MIXTRAL = ModelShape.preset("mixtral-8x7b")


def sent(shape: ModelShape, layout: Layout, sequence: int = 512, **options) -> dict:
    return sent_by_axis(traffic_per_step(shape, layout, sequence, **options))


@pytest.mark.verifies(
    TRAFFIC,
    "xtrain.plan.step_traffic:data_transfers",
    "xtrain.plan.step_traffic:_reduction",
)
@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("dtypes", sorted(DTYPES))
def test_stages_send_two_and_three_times_the_parameters(ranks, dtypes):
    """Elements of the ZeRO paper times the bytes of what travels."""
    sizes, share = DTYPES[dtypes], (ranks - 1) / ranks
    psi = LLAMA.parameters
    expected = {
        0: 2 * psi * sizes.gradient,
        1: psi * (sizes.gradient + sizes.weight),
        2: psi * (sizes.gradient + sizes.weight),
        3: psi * (sizes.gradient + 2 * sizes.weight),
    }
    for zero, volume in expected.items():
        found = sent(LLAMA, Layout(data=ranks, zero=zero), dtypes=dtypes)
        assert found == {"data": pytest.approx(volume * share, rel=1e-9)}
    elements = sent(LLAMA, Layout(data=ranks, zero=3), dtypes="zero16")["data"]
    plain = sent(LLAMA, Layout(data=ranks), dtypes="zero16")["data"]
    assert elements / plain == pytest.approx(1.5)


@pytest.mark.verifies(TRAFFIC)
def test_ten_billion_in_16_bit():
    """40 GB of plain data parallelism and 60 of stage 3, for many ranks."""
    shape = replace(LLAMA, num_hidden_layers=1)
    scale = 10e9 / shape.parameters
    for zero, gigabytes in ((0, 40), (3, 60)):
        found = sent(shape, Layout(data=4096, zero=zero), dtypes="zero16")["data"]
        assert found * scale / 1e9 == pytest.approx(gigabytes, rel=3e-4)


@pytest.mark.verifies(TRAFFIC)
def test_accumulation_repeats_what_may_not_stay():
    """m micro-batches: stage 1 reduces once, 2 m times, 3 also gathers 2 m times."""
    m, share, psi = 5, 3 / 4, LLAMA.parameters * 2
    once = {0: 2, 1: 2, 2: m + 1, 3: 3 * m}
    for zero, times in once.items():
        layout = Layout(data=4, zero=zero, micro_batches=m)
        found = sent(LLAMA, layout, dtypes="zero16")["data"]
        assert found == pytest.approx(times * psi * share, rel=1e-9)
    kept = Layout(data=4, zero=3, micro_batches=m, reshard_after_forward=False)
    found = sent(LLAMA, kept, dtypes="zero16")["data"]
    assert found == pytest.approx(2 * m * psi * share, rel=1e-9)


@pytest.mark.verifies(TRAFFIC)
def test_context_ranks_add_up_gradients():
    """All at once without shards; with shards, each rank its own, or in one group."""
    psi = LLAMA.parameters * 2
    whole = Layout(data=4, context=2)
    share = 2 * psi * 7 / 8
    of = {"dtypes": "zero16"}
    assert sent(LLAMA, whole, **of)["data"] == pytest.approx(share, rel=1e-9)
    sharded = replace(whole, zero=1)
    each = 2 * psi * 3 / 4 + 2 * psi / 4 / 2
    assert sent(LLAMA, sharded, **of)["data"] == pytest.approx(each, rel=1e-9)
    wide = replace(sharded, shard_context=True)
    assert sent(LLAMA, wide, **of)["data"] == pytest.approx(share, rel=1e-9)


@pytest.mark.verifies(TRAFFIC)
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_ranks_send_what_the_calls_say(sliced, recompute):
    layout = Layout(tensor=4, micro_batch=2, micro_batches=3, sequence_parallel=sliced,
                    recompute=recompute)  # fmt: skip
    calls = tensor_parallel_calls(
        LLAMA, 2, 512, 4, sequence_parallel=sliced, recompute=recompute == "full"
    )
    norms = bytes_sent(partial_gradient_calls(LLAMA, 32, 4, sequence_parallel=sliced))
    assert (norms > 0) == sliced  # once a step
    assert sent(LLAMA, layout) == {"tensor": 3 * bytes_sent(calls) + norms}
    transfers = traffic_per_step(LLAMA, layout, 512)
    hidden = sum(t.sent for t in transfers if t.overlapped)
    once_more = 2 * 32 * 3 * 2 * 512 * 4096 * 2 * 3 / 4  # a gather a block, backward
    assert hidden == (once_more if sliced else 0)


@pytest.mark.verifies(TRAFFIC)
@pytest.mark.parametrize("way", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_context_ranks_send_what_one_attention_sends(way, recompute):
    layout = Layout(
        context=4, context_way=way, micro_batch=3, micro_batches=2, recompute=recompute
    )
    forward, backward = context_bytes(way, 128, 32, 8, 128, 4, batch=3)
    passes = 2 if recompute == "full" else 1
    expected = 32 * 2 * (passes * forward + backward)
    assert sent(LLAMA, layout)["context"] == expected


@pytest.mark.verifies(TRAFFIC)
def test_experts_send_every_copy_there_and_back():
    """k h bytes a token each way, forward and backward, (e - 1) / e of them."""
    layout = Layout(data=4, expert=4, micro_batches=3)
    copies = 512 * 2 * 4096
    expected = 32 * 3 * 4 * copies * 2 * 3 // 4
    assert sent(MIXTRAL, layout)["expert"] == expected
    half = replace(DTYPES["megatron-bf16"], dispatch=1)
    fewer = sent(MIXTRAL, layout, dtypes=half)["expert"]
    assert fewer == expected - 32 * 3 * copies * 3 // 4
    again = sent(MIXTRAL, replace(layout, recompute="full"))["expert"]
    assert again == expected * 3 // 2
    assert "expert" not in sent(MIXTRAL, Layout(data=4))


@pytest.mark.verifies(TRAFFIC)
def test_experts_gradients_travel_among_those_who_hold_them():
    layout = Layout(data=8, expert=4)
    held = device_parameters(MIXTRAL, layout)
    found = sent(MIXTRAL, layout, dtypes="zero16")
    assert found["data"] == pytest.approx(2 * 2 * held.dense * 7 / 8, rel=1e-9)
    assert found["expert_data"] == pytest.approx(2 * 2 * held.experts / 2, rel=1e-9)
    assert "expert_data" not in sent(MIXTRAL, Layout(data=4, expert=4))


@pytest.mark.verifies(TRAFFIC)
@pytest.mark.parametrize(
    ("schedule", "chunks", "first", "inner"),
    [("one_f_one_b", 1, 1, 2), ("interleaved", 2, 3, 4), ("zb_v", 2, 2, 4),
     ("dualpipe", 1, 1, 2)],
)  # fmt: skip
def test_messages_between_stages(schedule, chunks, first, inner):
    """Activations forward, gradients back: of each stage that has a neighbour."""
    count = 8
    layout = Layout(pipeline=4, schedule=schedule, chunks=chunks, micro_batches=count)
    message = 512 * 4096 * 2
    half = 2 if schedule == "dualpipe" else 1
    both = 2 if schedule == "dualpipe" else 1
    found = [sent(LLAMA, layout, rank=rank)["pipeline"] for rank in range(4)]
    if schedule == "dualpipe":  # and the gradients of the stages that two ranks hold
        for rank in range(4):
            held = device_parameters(LLAMA, layout, rank)
            found[rank] -= 4 * held.total
    assert found[0] == both * first * count * message // half
    assert found[1] == both * inner * count * message // half
    # The last rank sends as much back: in a V both its stages are neighbours.
    assert found[3] == found[0]
    sliced = replace(layout, tensor=4, sequence_parallel=True)
    shared = 4 * device_parameters(LLAMA, sliced).total if half == 2 else 0
    assert sent(LLAMA, sliced)["pipeline"] - shared == found[0] // 4


@pytest.mark.verifies(TRAFFIC)
def test_the_cost_sketch_of_the_example():
    """470 MB a layer and micro-batch; 13 to 20 GB of gradients and weights a step."""
    shape = ModelShape.preset("llama-3-70b")
    layout = Layout(tensor=8, pipeline=2, data=4, micro_batches=256)
    found = sent(shape, layout, 4096)
    outside = 256 * 2 * 4096 * 8192 * 2 * 7 / 8  # the embedding's sum
    layer = (found["tensor"] - outside) / 40 / 256
    assert layer == pytest.approx(470e6, rel=1e-3)
    for dtypes, gigabytes in (("zero16", 13.2), ("megatron-bf16", 19.8)):
        one = sent(shape, replace(layout, zero=1), 4096, dtypes=dtypes)
        assert one["data"] / 1e9 == pytest.approx(gigabytes, abs=0.1)


@pytest.mark.verifies(TRANSFER)
@given(
    st.sampled_from(["ring_all_reduce", "ring_all_gather", "ring_reduce_scatter"]),
    st.integers(2, 9),
    st.integers(1, 1000),
    st.integers(1, 5),
)
def test_a_transfer_is_its_collective_so_many_times(algorithm, ranks, chunk, times):
    size = chunk * ranks
    transfer = Transfer("data", "x", algorithm, size, ranks, times)
    one = collective_traffic(algorithm, size, ranks)
    assert transfer.sent == times * one.max_sent
    assert transfer.seconds(1.0, 0.0) == times * one.rounds
    assert transfer.seconds(0.0, 1.0) == pytest.approx(float(transfer.sent))


@pytest.mark.verifies(TRAFFIC, "xtrain.plan.transfer:TransferDtypes")
def test_dtypes_of_ones_own_and_unknown_ones():
    own = TransferDtypes("own", gradient=8, weight=1)
    psi = LLAMA.parameters
    found = sent(LLAMA, Layout(data=2, zero=1), dtypes=own)["data"]
    assert found == pytest.approx(psi * 9 / 2, rel=1e-9)
    with pytest.raises(ValueError, match="dtypes='bf16' is not one of .*megatron-bf16"):
        traffic_per_step(LLAMA, Layout(), 8, dtypes="bf16")


@pytest.mark.verifies(
    "xtrain.plan.step_traffic:layer_transfers", "xtrain.plan.experts:all_to_all_bytes"
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_copies_of_tokens_take_the_bytes_of_uniform_routing(ranks):
    """Two formulas for one thing: that of a collective, and that of the experts."""
    shape = ModelShape.preset("mixtral-8x7b")
    layout = Layout(data=ranks, expert=ranks, micro_batch=3)
    found = layer_transfers(shape, layout, 1000, dtypes_of("fp32"), True)
    expected = all_to_all_bytes(3000, 2, shape.hidden_size, ranks, itemsize=4)
    sent = [transfer.sent for transfer in found if transfer.axis == "expert"]
    assert sent == [expected] * 4
