"""What is computed again, kept whole, or kept by the host: bytes and seconds."""

from dataclasses import replace

import pytest

from xtrain.plan import (
    ACCELERATORS,
    EXACT,
    FITTED,
    Assumptions,
    Estimator,
    Layout,
    ModelShape,
    broken_rules,
    estimate,
    layer_activations,
    memory_per_device,
    search,
    traffic_per_step,
)
from xtrain.plan.search import SearchSpace, candidates

LLAMA = ModelShape.preset("llama-3-8b")
LARGE = ModelShape.preset("llama-3-70b")
DEEPSEEK = ModelShape.preset("deepseek-v3")
ESTIMATOR = "xtrain.plan.estimate:Estimator"
LAYER = "xtrain.plan.activations:layer_activations"
MEMORY = "xtrain.plan.device_memory:memory_per_device"
SEARCH = "xtrain.plan.search:search"


# ------------------------------------------------------------- computed again


@pytest.mark.verifies(LAYER)
@pytest.mark.parametrize("tensor", [1, 8])
def test_selective_keeps_inputs_of_norms_and_of_the_activation_function(tensor):
    """Inputs of two norms, gate and up: the rest follows element by element."""
    found = layer_activations(LLAMA, 7, tensor=tensor, recompute="selective")
    whole = layer_activations(LLAMA, 7, tensor=tensor)
    assert found.norms == 7 * 2 * 2 * LLAMA.hidden_size == whole.norms / 2
    assert found.mlp == pytest.approx(7 * 2 * 2 * LLAMA.intermediate_size / tensor)
    assert (found.attention, found.statistics) == (whole.attention, whole.statistics)
    moe = layer_activations(DEEPSEEK, 7, tensor=tensor, recompute="selective")
    heads = DEEPSEEK.num_attention_heads * DEEPSEEK.v_head_dim / tensor
    assert moe.attention == pytest.approx(7 * 2 * (heads + 1536 + 512 + 64))
    inner = 2 * DEEPSEEK.moe_intermediate_size / tensor
    copies = 7 * 8 * (2 * DEEPSEEK.hidden_size + inner) * 2
    assert moe.experts == pytest.approx(copies + 2 * 4 * 7 * 256)


@pytest.mark.verifies(ESTIMATOR, "xtrain.plan.pass_seconds:PassTimes")
def test_selective_computes_passes_again_and_up_projections_of_latent_attention():
    for shape, sequence in ((LLAMA, 4096), (DEEPSEEK, 4096)):
        estimator = Estimator(shape, "h100", sequence)
        plain, again = Layout(), Layout(recompute="selective")
        work = estimator.passes.layer_work(plain, moe=False)
        products = shape.recomputed_products(1)
        more = work.passes + sum(
            estimator.passes.kernels.product(sequence, *one) for one in products
        )
        assert bool(products) == (shape is DEEPSEEK)
        passes = [estimator.passes.of_layer(way, False) for way in (plain, again)]
        assert passes[1].seconds - passes[0].seconds == pytest.approx(more)


@pytest.mark.verifies(ESTIMATOR, MEMORY)
@pytest.mark.parametrize("pipeline", [1, 4])
def test_some_layers_lie_between_selective_and_full_in_equal_steps(pipeline):
    layers = LARGE.num_hidden_layers // pipeline
    cut = {"tensor": 8, "sequence_parallel": True, "pipeline": pipeline}
    plain = Layout(**cut, micro_batches=8, recompute="full")
    estimator = Estimator(LARGE, "h100", 8192)

    def both(layout):
        one = estimator.estimate(layout)
        kept = memory_per_device(LARGE, layout, 8192).activations
        return one.parts["compute"], kept, one.hfu * one.seconds

    none = both(replace(plain, recompute="selective"))
    every = both(plain)
    assert both(replace(plain, recomputed_layers=layers)) == pytest.approx(every)
    for count in (1, layers // 2, layers - 1):
        some = both(replace(plain, recomputed_layers=count))
        for at in range(3):
            step = (every[at] - none[at]) * count / layers
            assert some[at] == pytest.approx(none[at] + step, rel=1e-9)


@pytest.mark.verifies(ESTIMATOR)
def test_no_more_layers_are_recomputed_than_memory_asks_for():
    estimator = Estimator(LARGE, "h100", 8192)
    full = Layout(tensor=4, sequence_parallel=True, pipeline=4, micro_batches=8,
                  micro_batch=2, data=4, zero=1, recompute="full")  # fmt: skip
    found = estimator.fewest_recomputed(full)
    assert found.recomputed_layers and 1 < found.recomputed_layers < 20
    assert estimator.room(found) >= 0
    fewer = replace(found, recomputed_layers=found.recomputed_layers - 1)
    assert estimator.room(fewer) < 0
    assert found.recomputed == f"full {found.recomputed_layers}"
    roomy = Layout(recompute="full")  # everything fits into a larger device
    large = Estimator(LLAMA, "gb300", 1024)
    assert large.fewest_recomputed(roomy).recomputed_layers == 1


@pytest.mark.verifies(SEARCH)
def test_the_search_recomputes_as_few_layers_as_fit():
    found = search(LARGE, "h100", 64, 8192, 512, space=SearchSpace(recompute=("full",)))
    partial = [one for one in found.found if one.layout.recomputed_layers]
    assert partial and all(one.verdict == "fits" for one in partial)
    for one in partial[:20]:
        whole = replace(one.layout, recomputed_layers=None)
        assert estimate(LARGE, whole, "h100", 8192).seconds >= one.seconds


@pytest.mark.verifies("xtrain.plan.layout_rules:broken_rules")
def test_only_full_recomputation_counts_layers():
    wrong = Layout(recompute="selective", recomputed_layers=3)
    (broken,) = broken_rules(LLAMA, wrong, 1024)
    assert "recomputed_layers=3 with recompute='selective'" in broken.why
    with pytest.raises(ValueError, match="recomputed_layers=0"):
        Layout(recompute="full", recomputed_layers=0)


# ---------------------------------------------------------- reduced at the end


@pytest.mark.verifies("xtrain.plan.step_traffic:traffic_per_step", MEMORY)
def test_stage_2_in_a_pipeline_reduces_once_and_keeps_whole_gradients():
    each = Layout(pipeline=4, data=8, zero=2, micro_batches=16)
    once = replace(each, reduce_at_end=True)
    stage_1 = replace(each, zero=1)
    scattered = {}
    for name, layout in (("each", each), ("once", once), ("1", stage_1)):
        (scatter,) = [one for one in traffic_per_step(LLAMA, layout, 256)
                      if one.what == "gradients"]  # fmt: skip
        scattered[name] = scatter.sent
    assert scattered["each"] == 16 * scattered["once"]
    assert scattered["once"] == scattered["1"]
    held = {layout: memory_per_device(LLAMA, layout, 256) for layout in (once, stage_1)}
    assert held[once] == held[stage_1]
    assert memory_per_device(LLAMA, each, 256).states < held[once].states
    seconds = [estimate(LLAMA, one, "h100", 256).seconds for one in (once, stage_1)]
    assert seconds[0] == pytest.approx(seconds[1])
    (broken,) = broken_rules(LLAMA, each, 256)
    assert "reduce_at_end=True" in broken.why and not broken_rules(LLAMA, once, 256)
    (broken,) = broken_rules(LLAMA, replace(stage_1, reduce_at_end=True), 256)
    assert "reduce_at_end=True with zero=1" in broken.why


@pytest.mark.verifies("xtrain.plan.search:candidates")
def test_stage_2_is_tried_in_a_pipeline_where_stage_1_is_not():
    for zero, expected in (((1, 2), {False}), ((2,), {True})):
        found = candidates(LLAMA, 8, 64, SearchSpace(zero=zero, pipeline=(4,)))
        stage_2 = {one.reduce_at_end for one in found if one.zero == 2}
        assert stage_2 == expected


# --------------------------------------------------------------------- offload


@pytest.mark.verifies(ESTIMATOR, MEMORY)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_offload_moves_the_optimizer_to_the_host(zero):
    """12 bytes a parameter of a shard leave the device; 4 go there and 2 come back."""
    near = Layout(data=8, zero=zero)
    away = replace(near, offload=True)
    here, there = (estimate(LLAMA, one, "h100", 256) for one in (near, away))
    shard = LLAMA.parameters / (8 if zero else 1)
    moved = here.memory.total - there.memory.total
    assert moved == pytest.approx(12 * shard)
    assert there.memory.moments == there.memory.master == 0
    server = ACCELERATORS["h100"].server
    # State read and written, gradients read, weights written; then over the link.
    expected = (24 + 4 + 2) * shard / server.memory + 6 * shard / server.link
    assert there.parts["optimizer"] == pytest.approx(expected)
    assert here.parts["optimizer"] < there.parts["optimizer"]
    assert str(away).endswith("offload")


@pytest.mark.verifies(ESTIMATOR, SEARCH)
def test_offload_is_refused_without_a_server_and_found_where_nothing_else_fits():
    with pytest.raises(ValueError, match="the server of tpu-v5p is not known"):
        estimate(LLAMA, Layout(offload=True), "tpu-v5p", 256)
    space = SearchSpace(offload=(False, True))
    found = search(LARGE, "h100", 8, 4096, 8, space=space).found
    assert found and all(one.layout.offload for one in found)
    assert not search(LARGE, "h100", 8, 4096, 8).found


# ----------------------------------------------------------- pieces, messages


@pytest.mark.verifies(ESTIMATOR, "xtrain.plan.pass_seconds:PassTimes")
def test_pieces_hide_behind_the_product_beside_them():
    layout = Layout(tensor=8, sequence_parallel=True)
    waits = {}
    for pieces in (0.0, 0.5, 1.0):
        constants = FITTED._replace(pieces=pieces)
        assumed = Assumptions(constants=constants, tensor_overlap=True)
        estimator = Estimator(LLAMA, "h100", 4096, assumed)
        at_the_end = estimator.partial_seconds(layout)  # beside no product
        waits[pieces] = estimator.estimate(layout).parts["tensor"] - at_the_end
    plain = estimate(LLAMA, layout, "h100", 4096).parts["tensor"] - at_the_end
    assert waits[0.0] == pytest.approx(plain)
    assert waits[0.5] == pytest.approx(plain / 2)
    assert waits[1.0] < waits[0.5]
    slow = estimate(
        LLAMA, replace(layout, tensor=16), "h100", 4096, network=1e8,
        tensor_overlap=True, constants=FITTED._replace(pieces=1.0),
    )  # fmt: skip
    assert slow.parts["tensor"] > slow.parts["compute"]  # no product is that long


@pytest.mark.verifies(ESTIMATOR)
def test_tensor_ranks_that_hold_the_same_send_a_part_each_to_the_next_stage():
    constants = EXACT
    delay = {}
    for sliced in (False, True):
        layout = Layout(tensor=8, sequence_parallel=sliced, pipeline=4, micro_batches=8)
        estimator = Estimator(LARGE, "h100", 4096, Assumptions(constants=constants))
        delay[sliced] = estimator.delay(layout)
    assert delay[False] == delay[True]


@pytest.mark.verifies(
    "xtrain.plan.kernels:Kernels", "xtrain.plan.pass_seconds:PassTimes"
)
def test_gradients_of_each_micro_batch_are_added_in_fp32():
    """Of one layer: 8 bytes a weight, read and written, whatever the rows."""
    added = {}
    for accumulate in (0.0, 1.0):
        assumed = Assumptions(constants=EXACT._replace(accumulate=accumulate))
        estimator = Estimator(LLAMA, "h100", 128, assumed)
        added[accumulate] = estimator.passes.of_layer(Layout(), False).backward_weight
    weights = LLAMA.parameters_of_layer(0) - 2 * LLAMA.hidden_size
    expected = 8 * weights / ACCELERATORS["h100"].memory_bandwidth
    assert added[1.0] - added[0.0] == pytest.approx(expected)
