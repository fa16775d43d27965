"""Layouts: each rule by name, and that what they allow can be built."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan import Layout, ModelShape, broken_rules, check_layout, layers_of_stage
from xtrain.plan.layout import CHUNKS, SCHEDULE_NAMES
from xtrain.plan.layout_rules import padded_vocabulary
from xtrain.schedules import SCHEDULES

RULES = "xtrain.plan.layout_rules:broken_rules"
LAYOUT = "xtrain.plan.layout:Layout"
LLAMA = ModelShape.preset("llama-3-70b")
MIXTRAL = ModelShape.preset("mixtral-8x7b")


def rules(shape: ModelShape, sequence: int = 4096, **sizes) -> list[str]:
    known = {"gpus", "batch", "sharded_pipeline"}
    options = {name: sizes.pop(name) for name in known & sizes.keys()}
    return [r.rule for r in broken_rules(shape, Layout(**sizes), sequence, **options)]


@pytest.mark.verifies(RULES)
def test_the_layout_of_the_example_is_legal():
    sizes = {"tensor": 8, "pipeline": 2, "data": 4, "zero": 1}
    assert rules(LLAMA, **sizes, sequence_parallel=True, gpus=64) == []
    assert rules(LLAMA, **sizes, gpus=64, batch=4) == []
    assert str(Layout(**sizes)) == "TP8 PP2 DP4 ZeRO-1"
    assert str(Layout()) == "DP1 ZeRO-0"


@pytest.mark.verifies(RULES)
@pytest.mark.parametrize(
    ("shape", "sizes", "rule"),
    [
        (LLAMA, {"tensor": 8, "gpus": 64}, "devices"),
        (LLAMA, {"data": 4, "batch": 6}, "batch"),
        (LLAMA, {"tensor": 128}, "heads"),
        (ModelShape(vocab_size=64, hidden_size=16, intermediate_size=12,
                    num_hidden_layers=1, num_attention_heads=8), {"tensor": 8},
         "intermediate"),
        (ModelShape(vocab_size=64, hidden_size=16, intermediate_size=16,
                    num_hidden_layers=1, num_attention_heads=8, num_local_experts=2,
                    num_experts_per_tok=1, moe_intermediate_size=12), {"tensor": 8},
         "expert-intermediate"),
        (ModelShape.preset("gpt-3-175b"), {"tensor": 8}, "vocabulary"),
        (ModelShape(vocab_size=60, hidden_size=24, intermediate_size=24,
                    num_hidden_layers=1, num_attention_heads=12,
                    num_key_value_heads=4), {"tensor": 6}, "key-heads"),
        (LLAMA, {"tensor": 8, "sequence_parallel": True, "sequence": 4100},
         "sequence-parallel"),
        (LLAMA, {"tensor": 8, "context": 2, "sequence_parallel": True,
                 "sequence": 4104}, "sequence-parallel"),
        (LLAMA, {"context": 8, "sequence": 4104}, "sequence"),
        (LLAMA, {"tensor": 8, "context": 16, "context_way": "ulysses"},
         "ulysses-heads"),
        (LLAMA, {"pipeline": 81}, "layers"),
        (LLAMA, {"pipeline": 40, "chunks": 3, "schedule": "interleaved",
                 "micro_batches": 40}, "layers"),
        (LLAMA, {"pipeline": 4, "chunks": 2}, "chunks"),
        (LLAMA, {"pipeline": 3, "schedule": "dualpipe", "micro_batches": 12}, "mirror"),
        (LLAMA, {"pipeline": 4, "schedule": "dualpipe", "micro_batches": 6},
         "dualpipe"),
        (LLAMA, {"data": 4, "expert": 2}, "experts"),
        (MIXTRAL, {"data": 16, "expert": 16}, "experts"),
        (MIXTRAL, {"data": 6, "expert": 4}, "expert-axis"),
        (LLAMA, {"data": 4, "pipeline": 2, "zero": 2}, "zero-with-pipeline"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named(shape, sizes, rule):
    assert rules(shape, **sizes) == [rule]


@pytest.mark.verifies(RULES, "xtrain.plan.layout_rules:check_layout")
def test_every_broken_rule_is_said_with_its_numbers():
    layout = Layout(tensor=128, pipeline=2, data=3, zero=3)
    said = r"heads: num_attention_heads=64 .*tensor=128; .*zero-with-pipeline: zero=3"
    with pytest.raises(ValueError, match=said):
        check_layout(LLAMA, layout, 4096)
    check_layout(LLAMA, Layout(pipeline=2, data=3, zero=3), 4096, sharded_pipeline=True)
    vocabulary = broken_rules(ModelShape.preset("gpt-3-175b"), Layout(tensor=8), 2048)
    assert "51200" in vocabulary[0].why


@pytest.mark.verifies("xtrain.plan.layout_rules:padded_vocabulary")
def test_padded_vocabulary_of_gpt2():
    assert [padded_vocabulary(50257, tensor) for tensor in (1, 2, 4, 8)] == [
        50304, 50432, 50688, 51200,
    ]  # fmt: skip


@pytest.mark.verifies(RULES, LAYOUT)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_schedule_is_legal_where_it_can_be_made(name):
    """And a rank holds the stages that the schedule gives it."""
    for ranks in range(1, 7):
        for count in range(1, 19):
            layout = Layout(pipeline=ranks, micro_batches=count, schedule=name,
                            chunks=CHUNKS.get(name, 1) or 2)  # fmt: skip
            broken = broken_rules(LLAMA, layout, 4096)
            try:
                made = SCHEDULES[name](ranks, count)
            except ValueError:
                assert broken, (name, ranks, count)
                continue
            assert not broken, (name, ranks, count, broken)
            for rank in range(ranks):
                assert layout.stages_of(rank) == made.stages_of(rank)
    with pytest.raises(ValueError, match="rank=6 of pipeline=6"):
        layout.stages_of(6)


@pytest.mark.verifies("xtrain.plan.layout:layers_of_stage")
@given(st.integers(1, 130), st.data())
def test_layers_are_dealt_out_once_and_evenly(layers, data):
    stages = data.draw(st.integers(1, layers))
    dealt = [layers_of_stage(layers, stages, stage) for stage in range(stages)]
    assert [layer for stage in dealt for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes) or sizes[-1] == max(sizes) == max(sizes[1:])


@pytest.mark.verifies("xtrain.plan.layout:layers_of_stage")
def test_llama_405b_has_a_layer_less_at_both_ends():
    sizes = [len(layers_of_stage(126, 16, stage)) for stage in range(16)]
    assert sizes == [7, *[8] * 14, 7]


@pytest.mark.verifies(LAYOUT)
def test_axes_multiply_and_experts_divide_the_data_ranks():
    layout = Layout(data=8, tensor=2, pipeline=4, context=2, expert=4, micro_batch=3,
                    micro_batches=5, schedule="interleaved", chunks=2)  # fmt: skip
    assert (layout.gpus, layout.batch, layout.stages) == (128, 120, 8)
    assert (layout.expert_data, layout.shard_ranks) == (2, 8)
    wide = Layout(data=8, context=2, expert=4, shard_context=True)
    assert (wide.shard_ranks, wide.expert_shard_ranks) == (16, 4)


@pytest.mark.verifies(LAYOUT)
@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor": 0}, "tensor=0 is not an int of at least 1"),
        ({"data": True}, "data=True is not an int"),
        ({"micro_batches": 1.0}, r"micro_batches=1\.0 is not an int"),
        ({"zero": 4}, r"zero=4 is not one of 0, 1, 2, 3"),
        ({"schedule": "1f1b"}, "schedule='1f1b' is not one of"),
        ({"recompute": "some"}, "recompute='some' is not one of"),
        ({"context_way": "star"}, "context_way='star' is not one of"),
    ],
)
def test_a_bad_value_is_refused(sizes, said):
    with pytest.raises(ValueError, match=said):
        Layout(**sizes)
