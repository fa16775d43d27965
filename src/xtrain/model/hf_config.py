"""The `config.json` of a checkpoint of `hf_kinds`, to and from an `XtrainConfig`.

Rotary positions are spelled in two ways: older files have `rope_theta` and
`rope_scaling`, newer ones both in `rope_parameters`. Both are read; the older is
written, which old and new libraries read.

A Mixtral adds its load-balancing loss if `output_router_logits` is true; otherwise the
coefficient is read as 0. It is that of all layers' tokens together, unless an entry of
ours, `router_aux_loss_pooled`, is false. Our other losses of routers are entries of
ours, too.
"""

import dataclasses
import sys
from typing import Any

import torch

from xtrain.model.config import XtrainConfig
from xtrain.model.hf_kinds import (
    KINDS,
    kind_for,
    kind_of,
    read_windows,
    window_entries,
)
from xtrain.plan.checks import require_positive, require_whole
from xtrain.tensor_parallel.rope import RopeScaling

SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
ABSENT: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1.0),
    "is_causal": (None, True),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
"""Entries that may be absent, and the values with which they change nothing. Tensors of
biases and further norms are refused as left over."""
EXPERT_NAMES = ("num_local_experts", "num_experts_per_tok")
OWN_LOSSES = {
    "router_aux_loss_pooled": True,
    "router_sequence_loss_coef": 0.0,
    "router_z_loss_coef": 0.0,
}
"""Entries of ours, and what a file without them means."""
MOST = 2**31 - 1
"""Of any size."""


def config_from_hf(values: dict[str, Any]) -> XtrainConfig:
    """The config that these entries of a `config.json` stand for.

    Raises:
        ValueError: an entry is missing, or its value is not supported.
    """
    kind = kind_of(values)
    has, absent = KINDS[kind], dict(ABSENT)
    if not has.windows:
        absent["sliding_window"] = (None,)
    for name, allowed in absent.items():
        if values.get(name) not in allowed:
            raise ValueError(f"{name}={values[name]!r}, which this model has not")
    names = (*SAME_NAMES, *EXPERT_NAMES) if has.experts else SAME_NAMES
    missing = [name for name in (*names, *has.needed) if name not in values]
    if missing:
        raise ValueError(f"config.json has no {', '.join(missing)}")
    for name in (*names, "num_key_value_heads", "head_dim"):
        if values.get(name) is not None or name in names:
            _check_size(name, values[name])
    theta, scaling = _rope(values, has.theta)
    given = {name: values[name] for name in names}
    if values.get("head_dim") is not None:
        given["head_dim"] = values["head_dim"]
    return XtrainConfig(
        **given,
        **_auxiliary(values, kind),
        **read_windows(values, kind),
        qkv_bias=has.qkv_bias,
        qk_norm=has.qk_norm,
        attention_dropout=values.get("attention_dropout", 0.0),
        num_key_value_heads=values.get("num_key_value_heads"),  # type: ignore[arg-type]
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        rms_norm_eps=_number("rms_norm_eps", values.get("rms_norm_eps", has.eps)),
        initializer_range=_number(
            "initializer_range", values.get("initializer_range", 0.02)
        ),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def config_to_hf(
    config: XtrainConfig, dtype: str, found: str | None = None
) -> dict[str, Any]:
    """The entries of `config.json`; `dtype` is torch's name for it, as "bfloat16".

    Args:
        found: the `model_type` of the files that the model comes from.
    """
    scaling, kind = config.rope_scaling, kind_for(config, found)
    experts: dict[str, Any] = {}
    if config.num_local_experts:
        experts = {name: getattr(config, name) for name in EXPERT_NAMES}
        experts["router_aux_loss_coef"] = config.router_aux_loss_coef
        experts["output_router_logits"] = config.router_aux_loss_coef > 0
        experts |= {name: getattr(config, name) for name in OWN_LOSSES}
    return {
        "architectures": [KINDS[kind].architecture],
        "model_type": kind,
        **KINDS[kind].fixed,
        **window_entries(config, kind),
        "attention_dropout": config.attention_dropout,
        **{name: getattr(config, name) for name in SAME_NAMES},
        **experts,
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


def entries_to_write(
    config: XtrainConfig, dtype: torch.dtype, found: dict[str, Any]
) -> dict[str, Any]:
    """The entries of `config.json`: those of `found`, but for what has changed.

    Args:
        found: all entries of the file that the model comes from, also those that the
            model does not read; {} of a model that comes from none.
    """
    kind, text = found.get("model_type"), str(dtype).removeprefix("torch.")
    own = config_to_hf(config, text, kind)
    if not found:
        return own
    before = config_to_hf(config_from_hf(found), text, kind)
    changed = {name: own[name] for name in own if own[name] != before.get(name)}
    dtypes = [name for name in ("dtype", "torch_dtype") if name in found]
    return found | changed | dict.fromkeys(dtypes or ["torch_dtype"], text)


def check_architecture(config: XtrainConfig) -> None:
    """ValueError for parts that no files of `hf_kinds` can describe."""
    kind_for(config)
    if not config.num_local_experts:
        return
    mixtral = {
        "moe_intermediate_size": config.intermediate_size,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "scoring_func": "softmax",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "balance_bias": False,
    }
    for name, needed in mixtral.items():
        if getattr(config, name) != needed:
            raise ValueError(
                f"{name}={getattr(config, name)!r}: files of Hugging Face are written "
                f"of Mixtral's experts, which have {needed!r}"
            )


def _auxiliary(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """The coefficient of the load-balancing loss, if it is added."""
    added = values.get("output_router_logits", False)
    if not isinstance(added, bool):
        raise ValueError(f"output_router_logits={added!r} is not a bool")
    if not KINDS[kind].experts:
        return {}
    found = {name: values.get(name, other) for name, other in OWN_LOSSES.items()}
    if added:
        found["router_aux_loss_coef"] = values.get("router_aux_loss_coef", 0.001)
    return found


def _check_size(name: str, value: object) -> None:
    """ValueError unless this can be the size of a tensor."""
    require_whole(name, value)
    if value > MOST:  # type: ignore[operator]
        raise ValueError(f"{name} is above {MOST}")


def _number(name: str, value: Any) -> float:
    """A finite number above 0, as a float."""
    require_positive(name, value)
    if value > sys.float_info.max:
        raise ValueError(f"{name} is above {sys.float_info.max:.3g}")
    return float(value)


def _rope(
    values: dict[str, Any], default_theta: float
) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from either spelling."""
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ValueError(f"rotary parameters {found!r} are not a table")
    for name in found.keys() & ABSENT.keys():
        if found[name] not in ABSENT[name]:
            raise ValueError(f"{name}={found[name]!r}, which this model has not")
    theta = found.get("rope_theta", values.get("rope_theta", default_theta))
    theta = _number("rope_theta", theta)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} is neither 'default' nor 'llama3'")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"rope_type llama3 without {', '.join(missing)}")
    *numbers, length = names
    _check_size(length, found[length])
    scaling: dict[str, Any] = {name: _number(name, found[name]) for name in numbers}
    return theta, RopeScaling(**scaling, **{length: found[length]})
