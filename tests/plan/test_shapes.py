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
    "mixtral-8x7b": 46_702_792_704,  # and Mistral AI's
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


FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY = {
    "num_local_experts": 9,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2,
    "n_shared_experts": 3,
}


@pytest.mark.verifies("xtrain.plan.shapes:ModelShape")
def test_parameters_of_experts_matrix_by_matrix():
    """hidden 6; attention 4 x 6 x 6; two norms a layer."""
    rest = 2 * 13 * 6 + 6 + 2 * (4 * 36 + 2 * 6)
    few = ModelShape(**SIZES, **FEW)
    assert few.moe_intermediate_size == 5
    assert few.parameters == rest + 2 * (4 * 6 + 4 * 3 * 6 * 5)
    assert few.active_parameters == rest + 2 * (4 * 6 + 2 * 3 * 6 * 5)
    many = ModelShape(**SIZES, **MANY, first_k_dense_replace=1)
    assert many.parameters == rest + 3 * 6 * 5 + 9 * 6 + (9 + 3) * 3 * 6 * 2
    assert many.active_parameters == rest + 3 * 6 * 5 + 9 * 6 + (4 + 3) * 3 * 6 * 2
    layers = [many.parameters_of_layer(0), many.parameters_of_layer(1)]
    assert sum(layers) == many.parameters - 2 * 13 * 6 - 6
    assert many.layer_parameters == layers[1]
    assert [many.is_moe(0), many.is_moe(1), few.is_moe(0)] == [False, True, True]
    assert not ModelShape(**SIZES).is_moe(0)


@pytest.mark.verifies("xtrain.plan.shapes:ModelShape")
def test_mixtral_meets_13_billion_of_its_parameters():
    assert ModelShape.preset("mixtral-8x7b").active_parameters == 12_879_925_248


def products(shape: ModelShape, sequence: int, causal: bool) -> int:
    """Multiply-adds of one sequence's forward, one matrix product after the other."""
    h, d = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads, shape.num_key_value_heads
    total = 0
    for layer in range(shape.num_hidden_layers):
        for rows in (queries * d, keys * d, keys * d):  # q, k, v
            total += sequence * h * rows
        total += sequence * queries * d * h  # o
        for _ in range(queries):
            for position in range(sequence):
                seen = position + 1 if causal else sequence
                total += 2 * seen * d  # scores, and the weighted sum of values
        if layer < shape.first_k_dense_replace or not shape.num_local_experts:
            total += 3 * sequence * h * shape.intermediate_size
            continue
        total += sequence * h * shape.num_local_experts  # the router's scores
        met = shape.num_experts_per_tok + shape.n_shared_experts
        for _ in range(met):
            total += 3 * sequence * h * shape.moe_intermediate_size
    return total + sequence * h * shape.vocab_size


@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (4, 1)]),
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    head_dim=st.integers(1, 5),
    experts=st.sampled_from([{}, FEW, MANY]),
    sequence=st.integers(1, 12),
    causal=st.booleans(),
)
def test_flops_are_those_of_every_matrix_product(
    heads, sizes, head_dim, experts, sequence, causal
):
    """2 FLOPs a multiply-add, and backward takes twice what forward takes."""
    shape = ModelShape(
        **dict(zip(list(SIZES)[:4], sizes, strict=True)),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        **experts,
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
        ({"num_local_experts": -1}, "num_local_experts=-1 is not an int of at least 0"),
        ({"num_local_experts": 4}, "num_experts_per_tok=0 is not an int of at least 1"),
        ({"n_shared_experts": 1}, "n_shared_experts=1 of a model without experts"),
        ({"moe_intermediate_size": 3}, "moe_intermediate_size=3 of a model without"),
        (FEW | {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is above"),
        (FEW | {"moe_intermediate_size": 0}, "moe_intermediate_size=0 is not an int"),
        (FEW | {"first_k_dense_replace": 2}, "=2 leaves no layer with experts"),
    ],
)  # fmt: skip
def test_a_bad_size_is_refused_with_its_rule(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ModelShape(**(SIZES | changes))


def test_a_sequence_without_tokens_has_no_flops():
    with pytest.raises(ValueError, match="sequence=0"):
        ModelShape(**SIZES).flops_per_token(0)
