"""The sizes of a model from its Hugging Face `config.json`.

    llama, mistral     a decoder with grouped keys, SwiGLU and RMSNorm
    qwen2, qwen3       the same with biases of q, k and v, or norms of q and k
    mixtral            experts in place of every SwiGLU
    deepseek_v3        latent attention, shared experts, first layers without experts
    gpt2               two matrices a layer, learned positions, biases

Only sizes are read. A model with parts that these have not (biases of a Llama) would be
counted wrong, so its `model_type`, or the part, is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtrain.plan.checks import require_whole, shown
from xtrain.plan.published import GPTShape, LatentShape
from xtrain.plan.shapes import ModelShape

LLAMA = {
    name: name
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
}
MIXTRAL = LLAMA | {
    "num_local_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
}
DEEPSEEK = LLAMA | {
    "head_dim": "qk_nope_head_dim",
    "num_local_experts": "n_routed_experts",
} | {
    name: name
    for name in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
    )
}  # fmt: skip
GPT_2 = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
ENTRIES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA,
           "mixtral": MIXTRAL, "deepseek_v3": DEEPSEEK, "gpt2": GPT_2}  # fmt: skip
"""Our field, and the entry of the file, by model type."""
PARTS: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}
}  # fmt: skip
"""What models of a type have besides."""
OPTIONAL = ("num_key_value_heads", "head_dim", "tie_word_embeddings")
REFUSED = ("attention_bias", "mlp_bias")
MOST_BYTES = 2**22


def shape_of_config(values: Mapping[str, Any]) -> ModelShape:
    """The model sizes of these entries of a `config.json`.

    Raises:
        ValueError: for a type of model that is not counted here, a part that it should
            not have, or an entry that is missing.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ENTRIES:
        known = ", ".join(ENTRIES)
        raise ValueError(f"model_type={shown(kind)}: sizes are read of {known}")
    for name in REFUSED:
        if values.get(name):
            raise ValueError(f"{name}={shown(values[name])}: biases are not counted")
    entries = ENTRIES[kind]
    missing = [entry for entry in entries.values() if values.get(entry) is None]
    if missing:
        raise ValueError(f"a config.json of {kind} without {', '.join(missing)}")
    sizes = {field: values[entry] for field, entry in entries.items()}
    for field, entry in entries.items():
        require_whole(entry, sizes[field], least=0)  # each shape has its own least
    if kind == "gpt2":
        inner = values.get("n_inner")
        inner = 4 * sizes["hidden_size"] if inner is None else inner
        tied = values.get("tie_word_embeddings", True)
        return GPTShape(**sizes, intermediate_size=inner, tie_word_embeddings=tied)
    for name in OPTIONAL:
        if name not in sizes and values.get(name) is not None:
            sizes[name] = values[name]
    if kind == "deepseek_v3":
        sizes.pop("num_key_value_heads", None)  # all heads share the latent vector
        return LatentShape(**sizes)
    return ModelShape(**sizes, **PARTS.get(kind, {}))


def load_shape(name: str) -> ModelShape:
    """A preset by its name, or the `config.json` at a path, or in that folder."""
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    elif not path.exists():
        return ModelShape.preset(name)
    if not path.exists():
        raise ValueError(f"there is no {shown(str(path), 120)}")
    if not path.is_file():  # a pipe or a device would never end
        raise ValueError(f"{shown(str(path), 120)} is not a regular file")
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"{shown(str(path), 120)} is longer than {MOST_BYTES} bytes")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(str(path), 120)} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{shown(str(path), 120)} has no entries")
    return shape_of_config(values)
