"""Pictures and numbers of lc5 that come from runs."""

import re
from functools import partial

import pytest
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from xtrain.pipeline_parallel import checkpoint
from xtrain.schedules import SCHEDULES
from xtrain_docs.lectures.lc5 import data_parallel, recompute, stages
from xtrain_docs.lectures.lc5 import split_backward as split

# data ranks ---------------------------------------------------------------------------


RUNNER = "xtrain.pipeline_parallel.runner:PipelineRunner"


def formula(wrapper: str, weights: float, root: float, micro_batches: int) -> list:
    """Bytes a rank sends over two data ranks: in `runner.step`, in the update."""
    layers = weights - root
    return {
        "ddp": [weights, 0.0],
        "zero 1": [weights / 2, weights / 2],
        "zero 2": [weights / 2, weights / 2],
        "fsdp": [(root + 2 * micro_batches * layers + weights) / 2, 0.0],
        "fsdp kept": [weights, 0.0],
    }[wrapper]


@pytest.mark.verifies(RUNNER)
@pytest.mark.parametrize("wrapper", ["ddp", "zero 1", "zero 2", "fsdp", "fsdp kept"])
def test_each_wrapper_sends_over_data_ranks_what_its_formula_says(on_ranks, wrapper):
    for micro_batches in (4, 8):
        found = data_parallel.of_first_stage(wrapper, micro_batches)
        weights = found["weights"]
        right = formula(wrapper, weights, found["root"], micro_batches)
        for during, expected in zip(("step", "update"), right, strict=True):
            assert 0 <= found[during] - expected <= 0.01 * weights  # padding
            shown = data_parallel.sent_over_data(wrapper, micro_batches, during)
            assert shown == found[during] / weights


def test_the_picture_has_a_sum_at_the_end_of_each_rank():
    drawing = data_parallel.when_stages_reduce("one_f_one_b", 3, 4)
    assert drawing.count(">sum</text>") == drawing.count("REDUCE</title>") == 3


# split backward -----------------------------------------------------------------------


SPLIT = "xtrain.pipeline_parallel.split_backward:SplitBackward"


@pytest.mark.verifies(SPLIT)
def test_the_three_parts_of_linear_layers_are_equal_and_attention_has_no_third(
    on_ranks,
):
    config, tokens = split.CONFIG, split.BATCH * split.SEQUENCE
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    outputs = (queries, keys, keys, queries, inner, inner, inner)
    linear = {
        name: 2 * tokens * hidden * size
        for name, size in zip(split.LINEARS, outputs, strict=True)
    }
    attention = 4 * tokens * split.SEQUENCE * queries
    assert split.matmuls_by_part() == {
        "F": {**linear, "attention": attention},
        "B": {**linear, "attention": 2 * attention},
        "W": linear,
    }
    assert split.split_matmuls().count("<rect") == 3 * 7 + 2


def test_with_fused_kernels_a_layer_keeps_as_much_until_w_as_until_b():
    assert split.kept_until_w("llama-3-8b") == split.kept_until_b("llama-3-8b")
    assert split.kept_until_w("llama-3-8b") == 139_264
    for preset in ("llama-2-7b", "llama-3-70b"):
        share = split.kept_until_w(preset) / split.kept_until_b(preset)
        assert 0.95 < share <= 1


# recompute ----------------------------------------------------------------------------


LIBRARY = "xtrain.pipeline_parallel.recompute:checkpoint"
LAYERS = 8


@pytest.mark.verifies(LIBRARY)
def test_for_transformer_layers_the_smallest_segments_need_least(on_ranks):
    """And both counts are those of the page's forms."""
    of_input, of_layer = recompute.kept_bytes(1, 1), recompute.kept_bytes(1, 0)
    assert recompute.kept_bytes(LAYERS, 0) == LAYERS * of_layer
    peaks = []
    for each in (1, 2, 4, 8):
        kept = LAYERS // each * of_input
        assert recompute.kept_bytes(LAYERS, each) == kept
        peaks.append(max(n for _, n in recompute.live_bytes(LAYERS, each)))
        form = kept + each * of_layer + of_input
        assert peaks[-1] == pytest.approx(form, rel=0.01)
    assert peaks == sorted(peaks)
    none = max(n for _, n in recompute.live_bytes(LAYERS, 0))
    assert none == pytest.approx(LAYERS * of_layer + of_input, rel=0.01)
    assert peaks[0] < none / 3


@pytest.mark.verifies(LIBRARY)
def test_recompute_adds_one_forward_to_three():
    """And torch's leaves out the last matmul of each layer's second forward."""
    found = []
    for again in (
        lambda function, x: function(x),
        checkpoint,
        partial(torch_checkpoint, use_reentrant=False),
    ):
        layers, x = recompute.layers_and_input(2)
        with FlopCounterMode(display=False) as counter:
            for segment in recompute.segments(layers, 1):
                x = again(segment, x)
            x.sum().backward()
        found.append(counter.get_total_flops())
    assert [3 * flops / found[0] for flops in found] == [3, 4, 3.75]


@pytest.mark.verifies(LIBRARY)
def test_the_picture_has_every_end_of_a_layers_run(on_ranks):
    drawing = recompute.recompute_memory(6)
    lines = [part.split('"')[1] for part in drawing.split("<polyline")[1:]]
    lines = [line.partition('"')[0].split() for line in lines]
    assert [len(line) for line in lines] == [12, 18, 18]
    assert "backward begins" in drawing


def test_runs_of_a_segment_lie_between_two_backwards():
    kinds = ["forward", "forward", "again", "again", "backward", "backward"]
    points = recompute.placed([(kind, 2**20) for kind in kinds])
    assert [round(at, 2) for at, _ in points] == [1, 2, 2.33, 2.67, 3, 4]


# stages -------------------------------------------------------------------------------


BOX = r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="18"'
MODEL = (
    "xtrain.model.stages:make_modules",
    "xtrain.model.decoder_parts:DecoderParts",
    "xtrain.model.decoder_weights:DecoderWeights",
)


@pytest.mark.verifies(*MODEL)
def test_the_ranks_hold_the_stages_of_their_placement(on_ranks):
    for schedule in stages.PLACEMENTS:
        made = SCHEDULES[schedule](4, 8)
        found = stages.held(schedule)
        for rank, held in enumerate(found):
            assert [of["stage"] for of in held] == list(made.stages_of(rank))
        parameters = [stages.parameters_of_rank(schedule, rank) for rank in range(4)]
        assert sum(parameters) == pytest.approx(made.parameter_copies)
        flops = [stages.flops_of_rank(schedule, rank) for rank in range(4)]
        assert sum(flops) == pytest.approx(1)
        parts = [of["parts"] for held in found for of in held]
        numbers = sorted(n for part in parts for n in range(*part))
        assert numbers == sorted([*range(34)] * made.parameter_copies)


def test_a_box_of_the_picture_for_every_part_of_every_stage(on_ranks):
    drawn = stages.stages_of_a_model()
    copies = [SCHEDULES[s](4, 8).parameter_copies for s in stages.PLACEMENTS]
    assert drawn.count("<rect") == 34 * sum(copies)
    rights = [float(x) + float(wide) for x, wide in re.findall(BOX, drawn)]
    assert max(rights) < stages.WIDTH - 7
    assert "DualPipe: rank 3 holds stage 0 and stage 3" in drawn


@pytest.mark.verifies("xtrain.model.stages:part_costs")
def test_a_cut_by_cost_is_never_slower_and_the_head_costs_layers():
    for parts in (2, 4, 8, 16):
        assert 1 <= stages.slowest_stage(parts) < stages.slowest_stage(parts, True)
    assert stages.head_in_layers("llama-3-8b") > 2
    assert stages.head_in_layers("llama-2-7b") < 1
