"""The `config.json` of a Llama checkpoint, to and from an `XtrainConfig`.

Rotary positions are spelled in two ways: older files have `rope_theta` and
`rope_scaling`, newer ones both in `rope_parameters`. Both are read; the older is
written, which old and new libraries read.
"""

import dataclasses
from typing import Any

from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.rope import RopeScaling

SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
"""What the decoder is, whatever the config says: other values are refused."""


def config_from_hf(values: dict[str, Any]) -> XtrainConfig:
    """The config that these entries of a `config.json` stand for.

    Raises:
        ValueError: an entry is missing, or the model is one that this decoder is not.
    """
    for name, needed in FIXED.items():
        if values.get(name, needed) != needed:
            raise ValueError(f"{name}={values[name]!r}, but this model has {needed!r}")
    missing = [name for name in SAME_NAMES if name not in values]
    if missing:
        raise ValueError(f"config.json has no {', '.join(missing)}")
    heads = values["num_attention_heads"]
    theta, scaling = _rope(values)
    given = {} if values.get("head_dim") is None else {"head_dim": values["head_dim"]}
    return XtrainConfig(
        **{name: values[name] for name in SAME_NAMES},
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        **given,
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        initializer_range=values.get("initializer_range", 0.02),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def config_to_hf(config: XtrainConfig, dtype: str) -> dict[str, Any]:
    """The entries of `config.json`; `dtype` is torch's name for it, as "bfloat16"."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        **FIXED,
        **{name: getattr(config, name) for name in SAME_NAMES},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {"rope_type": "llama3", **dataclasses.asdict(scaling)},
        "torch_dtype": dtype,
    }


def _rope(values: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from either spelling."""
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ValueError(f"rotary parameters {found!r} are no table")
    theta = found.get("rope_theta", values.get("rope_theta", 10_000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} is neither 'default' nor 'llama3'")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"rope_type llama3 without {', '.join(missing)}")
    return float(theta), RopeScaling(**{name: found[name] for name in names})
