"""The picture and the numbers on the split backward."""

import pytest

from xtrain_docs.lectures.lc5 import split_backward as split

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
