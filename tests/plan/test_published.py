"""Published models: parameters to the unit, and part by part."""

import re
from dataclasses import replace

import pytest

from xtrain.model import XtrainConfig
from xtrain.plan import GPTShape, ModelShape
from xtrain.plan.published import DEEPSEEK_V3, GPT_3

PRESET = "xtrain.plan.shapes:ModelShape"
GPT = "xtrain.plan.published:GPTShape"
LATENT = "xtrain.plan.published:LatentShape"


@pytest.mark.verifies(PRESET, GPT, LATENT)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt-3-175b", 174_604_259_328),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_parameters_to_the_unit(name, parameters):
    assert ModelShape.preset(name).parameters == parameters


@pytest.mark.verifies(GPT)
def test_gpt3_is_equation_2_and_the_norm_before_the_head():
    h, layers, vocabulary, s = 12288, 96, 50257, 2048
    twelve = 12 * layers * h * h
    equation = twelve + 13 * layers * h + (vocabulary + s) * h
    assert GPT_3.parameters == equation + 2 * h
    assert GPT_3.parameters == pytest.approx(174.600e9, rel=3e-5)  # its table D.1
    assert GPT_3.position_table == s * h


@pytest.mark.verifies(GPT)
@pytest.mark.parametrize(
    ("billions", "heads", "h", "layers", "error"),
    [  # Narayanan et al., 2021, table 1, with V = 51200 and s = 2048
        (1.7, 24, 2304, 24, 0.03),
        (3.6, 32, 3072, 30, 0.0106),
        (7.5, 32, 4096, 36, 0.0106),
        (18.4, 48, 6144, 40, 0.0106),
        (39.1, 64, 8192, 48, 7e-4),
        (76.1, 80, 10240, 60, 7e-4),
        (145.6, 96, 12288, 80, 7e-4),
        (310.1, 128, 16384, 96, 7e-4),
        (529.6, 128, 20480, 105, 7e-4),
        (1008, 160, 25600, 128, 7e-4),
    ],
)
def test_table_1_of_megatron(billions, heads, h, layers, error):
    shape = gpt(h, heads, layers)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=error)


def gpt(h: int, heads: int, layers: int, vocabulary: int = 51200) -> GPTShape:
    return replace(
        GPT_3, vocab_size=vocabulary, hidden_size=h, intermediate_size=4 * h,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=h // heads,
    )  # fmt: skip


@pytest.mark.verifies(GPT, LATENT)
@pytest.mark.parametrize("name", ["gpt-3-175b", "deepseek-v3", "mixtral-8x7b"])
def test_parts_add_up(name):
    shape = ModelShape.preset(name)
    layers = range(shape.num_hidden_layers)
    total = sum(shape.parameters_of_layer(layer) for layer in layers)
    tables = 1 if shape.tie_word_embeddings else 2
    total += tables * shape.vocab_size * shape.hidden_size
    total += shape.position_table + shape.last_norm
    assert total == shape.parameters
    for layer in layers:
        whole = shape.parameters_of_layer(layer)
        assert shape.replicated_of_layer(layer) + shape.experts_of_layer(layer) < whole
        assert shape.vectors_of_layer(layer) < shape.hidden_size * 20


@pytest.mark.verifies(LATENT)
def test_deepseek_v3_part_by_part():
    """MLA and experts as the technical report counts them."""
    shape, h = DEEPSEEK_V3, 7168
    routed = sum(shape.experts_of_layer(layer) for layer in range(61))
    assert routed == 653_908_770_816
    assert routed / shape.parameters == pytest.approx(0.974, abs=1e-3)
    mla = h * 1536 + 1536 + 1536 * 128 * 192 + h * (512 + 64) + 512
    mla += 512 * 128 * 256 + 128 * 128 * h
    assert shape.parameters_of_layer(0) == mla + 2 * h + 3 * h * 18432
    experts = 257 * 3 * h * 2048 + 256 * h + 256  # shared one, router, its biases
    assert shape.parameters_of_layer(60) == mla + 2 * h + experts
    assert shape.active_parameters / 1e9 == pytest.approx(37.552, abs=1e-3)
    without = shape.active_parameters - shape.vocab_size * h
    assert without / 1e9 == pytest.approx(36.626, abs=1e-3)
    assert without / 36.7e9 == pytest.approx(1, abs=3e-3)  # README_WEIGHTS
    # The module of the second token: a layer, a projection of 2 h to h, three norms.
    module = shape.parameters_of_layer(60)
    projected = module + 2 * h * h + 3 * h
    assert module / 1e9 == pytest.approx(11.507, abs=1e-3)
    assert projected / 1e9 == pytest.approx(11.610, abs=1e-3)
    # What the published files hold: embedding and head twice, and in fp32, among what
    # is in it besides, the biases of 59 routers.
    stored = shape.parameters + projected - 59 * 256 + 2 * 129280 * h
    assert stored + 41_555_600 == 684_531_386_000


@pytest.mark.verifies(PRESET, LATENT)
def test_mixtral_and_deepseek_flops_are_those_of_active_matrices():
    for name in ("mixtral-8x7b", "deepseek-v3"):
        shape = ModelShape.preset(name)
        layers = range(shape.num_hidden_layers)
        matrices = sum(shape.matrices_met_in_layer(layer) for layer in layers)
        matrices += shape.vocab_size * shape.hidden_size
        pairs = shape.flops_per_token(2) - shape.flops_per_token(1)
        assert shape.flops_per_token(1) == 6 * matrices + pairs
        per_pair = 2 * 3 * shape.attention_width * shape.num_hidden_layers
        assert pairs == per_pair
    assert DEEPSEEK_V3.attention_width == 128 * (128 + 64 + 128)


@pytest.mark.verifies(PRESET)
def test_a_model_of_another_kind_is_not_made_of_what_it_is_not():
    with pytest.raises(ValueError, match=r"'gpt-3-175b'.*'llama-3-8b'"):
        XtrainConfig.preset("gpt-3-175b")
    with pytest.raises(ValueError, match="deepseek-v3"):
        ModelShape.preset("gpt-5")


@pytest.mark.verifies(GPT, LATENT)
@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        (GPT_3, {"max_position_embeddings": 0}, "max_position_embeddings=0 is not"),
        (
            GPT_3,
            {"num_local_experts": 2, "num_experts_per_tok": 1},
            "num_local_experts=2: a GPT layer has none",
        ),
        (DEEPSEEK_V3, {"kv_lora_rank": 0}, "kv_lora_rank=0 is not an int"),
        (DEEPSEEK_V3, {"v_head_dim": 1.5}, "v_head_dim=1.5 is not an int"),
    ],
)
def test_bad_sizes_are_refused(shape, changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        replace(shape, **changes)
