"""Sizes read from a `config.json`: parameters as transformers' own model."""

import json

import pytest
import torch

from xtrain.cli import main
from xtrain.plan import ModelShape, config_json
from xtrain.plan.config_json import load_shape, shape_of_config

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 5,
         "num_attention_heads": 6}  # fmt: skip
LLAMA = SIZES | {"intermediate_size": 40, "num_key_value_heads": 2}
DEEPSEEK = SIZES | {
    "intermediate_size": 50, "num_key_value_heads": 6, "q_lora_rank": 11,
    "kv_lora_rank": 7, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 9,
    "n_shared_experts": 2, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
CASES = {
    "llama": ("LlamaConfig", LLAMA),
    "llama, tied, wide heads": (
        "LlamaConfig", LLAMA | {"tie_word_embeddings": True, "head_dim": 10}),
    "mistral": ("MistralConfig", LLAMA | {"head_dim": 8}),
    "mixtral": ("MixtralConfig", LLAMA | {"num_local_experts": 7}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 24, "n_layer": 5, "n_head": 6,
                            "n_positions": 31}),
    "gpt2, own width": ("GPT2Config", {"n_embd": 24, "n_layer": 2, "n_head": 3,
                                       "n_inner": 70}),
}  # fmt: skip


@pytest.mark.verifies("xtrain.plan.config_json:shape_of_config")
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case):
    kind, sizes = CASES[case]
    config = getattr(transformers, kind)(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    for name, buffer in model.named_buffers():  # a router's bias is learned, too
        counted += buffer.numel() if name.endswith("correction_bias") else 0
    assert shape_of_config(config.to_dict()).parameters == counted


@pytest.mark.verifies("xtrain.plan.config_json:load_shape")
def test_a_name_a_folder_or_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"model_type": "llama"}))
    shape = load_shape(str(tmp_path))
    assert shape == load_shape(str(path)) == ModelShape(**LLAMA)
    assert load_shape("llama-3-8b") == ModelShape.preset("llama-3-8b")
    with pytest.raises(ValueError, match="preset 'llama-9'"):
        load_shape("llama-9")
    for text, said in (("{", "is not JSON"), ("[1]", "has no entries")):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            load_shape(str(path))


@pytest.mark.verifies("xtrain.plan.config_json:load_shape")
def test_a_layout_for_a_model_of_your_own(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"model_type": "llama"}))
    assert main(["plan", "--model", str(path), "--gpus", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == ModelShape(**LLAMA).parameters


QWEN = {  # sizes in the order of LLAMA's entries, further ones, published parameters
    "qwen2": ((152_064, 3584, 18_944, 28, 28), {"num_key_value_heads": 4},
              7_615_616_512),
    "qwen3": ((151_936, 4096, 12_288, 36, 32),
              {"num_key_value_heads": 8, "head_dim": 128}, 8_190_735_360),
}  # fmt: skip


@pytest.mark.verifies("xtrain.plan.config_json:shape_of_config")
@pytest.mark.parametrize("kind", QWEN)
def test_biases_and_norms_of_heads_are_counted_as_published(kind):
    """Qwen2.5-7B and Qwen3-8B."""
    sizes, more, parameters = QWEN[kind]
    values = dict(zip(config_json.LLAMA, sizes, strict=True)) | more
    shape = shape_of_config(values | {"model_type": kind})
    assert shape.parameters == parameters
    plain = shape_of_config(values | {"model_type": "llama"})
    assert shape.parameters > plain.parameters


@pytest.mark.verifies("xtrain.plan.config_json:shape_of_config")
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "phi3"}, "model_type='phi3'"),
        ({}, "model_type=None"),
        ({"model_type": "llama"}, "without vocab_size, hidden_size"),
        ({"model_type": "llama", **LLAMA, "attention_bias": True}, "biases"),
        ({"model_type": "deepseek_v3", **DEEPSEEK, "q_lora_rank": None}, "q_lora_rank"),
        ({"model_type": "llama", **LLAMA, "hidden_size": 0}, "hidden_size=0"),
    ],
)
def test_what_cannot_be_counted_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        shape_of_config(values)
