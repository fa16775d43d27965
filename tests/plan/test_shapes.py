"""Sizes of models: published counts, and FLOPs counted product by product."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan import ModelShape
from xtrain.plan.shapes import PRESETS

PUBLISHED = {  # elements in the weights that Meta published
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}
SIZES = {
    "vocab_size": 13,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


@pytest.mark.verifies("xtrain.plan.shapes:ModelShape")
def test_presets_have_as_many_parameters_as_published():
    assert {name: ModelShape.preset(name).parameters for name in PRESETS} == PUBLISHED


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'llama-9'.*'llama-2-70b'"):
        ModelShape.preset("llama-9")


def test_a_tied_head_counts_once():
    shape = ModelShape(**SIZES)
    tied = replace(shape, tie_word_embeddings=True)
    assert shape.parameters - tied.parameters == 13 * 6
    assert shape.active_parameters == shape.parameters


def test_what_is_not_given_follows_from_the_rest():
    shape = ModelShape(**SIZES)
    assert (shape.num_key_value_heads, shape.head_dim) == (3, 2)
    given = ModelShape(**SIZES, num_key_value_heads=1, head_dim=7)
    assert (given.num_key_value_heads, given.head_dim) == (1, 7)


def products(shape: ModelShape, sequence: int, causal: bool) -> int:
    """Multiply-adds of one sequence's forward, one matrix product after the other."""
    h, d = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads, shape.num_key_value_heads
    total = 0
    for _ in range(shape.num_hidden_layers):
        for rows in (queries * d, keys * d, keys * d):  # q, k, v
            total += sequence * h * rows
        total += sequence * queries * d * h  # o
        for _ in range(queries):
            for position in range(sequence):
                seen = position + 1 if causal else sequence
                total += 2 * seen * d  # scores, and the weighted sum of values
        total += 3 * sequence * h * shape.intermediate_size
    return total + sequence * h * shape.vocab_size


@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (4, 1)]),
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    head_dim=st.integers(1, 5),
    sequence=st.integers(1, 12),
    causal=st.booleans(),
)
def test_flops_are_those_of_every_matrix_product(
    heads, sizes, head_dim, sequence, causal
):
    """2 FLOPs a multiply-add, and backward takes twice what forward takes."""
    shape = ModelShape(
        **dict(zip(list(SIZES)[:4], sizes, strict=True)),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
    )
    expected = 3 * 2 * products(shape, sequence, causal)
    assert sequence * shape.flops_per_token(sequence, causal) == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *[({name: 0}, f"{name}=0 is not an int of at least 1") for name in SIZES],
        ({"hidden_size": 6.0}, "hidden_size=6.0 is not an int"),
        ({"vocab_size": True}, "vocab_size=True is not an int"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not an int"),
        ({"num_key_value_heads": 2}, "not a multiple of num_key_value_heads=2"),
        ({"head_dim": -2}, "head_dim=-2 is not an int of at least 1"),
        ({"hidden_size": 7}, "hidden_size=7 is not a multiple of"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not a bool"),
    ],
)  # fmt: skip
def test_a_bad_size_is_refused_with_its_rule(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ModelShape(**(SIZES | changes))


def test_a_sequence_without_tokens_has_no_flops():
    with pytest.raises(ValueError, match="sequence=0"):
        ModelShape(**SIZES).flops_per_token(0)
