"""The models of `transformers` that the decoder is, and where their files differ.

    type       biases    norms of    sliding windows         experts
               of qkv    q and k
    llama
    mistral                          all layers
    mixtral                          all layers              in every layer
    qwen2      yes                   all but first layers
    qwen3                yes         all but first layers

Sources: the `config.json` of these models, and transformers' defaults for entries that
a file does not have.
"""

from typing import Any, NamedTuple

from xtrain.model.config import XtrainConfig
from xtrain.plan.checks import require_whole


class Kind(NamedTuple):
    """What files of one `model_type` have.

    Attributes:
        eps, theta: of norms and rotary positions, if a file has none.
        fixed: entries with the one value that the decoder supports.
        qkv_bias, qk_norm: fields of the config.
        windows: layers may have a sliding window.
        experts: in place of every MLP.
        needed: entries whose default is that of one model, so a file must have them.
    """

    architecture: str
    eps: float
    theta: float
    fixed: dict[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: bool = True
    experts: bool = False
    needed: tuple[str, ...] = ()


SILU = {"hidden_act": "silu"}
NO_BIAS = {"attention_bias": False}
KINDS = {
    "llama": Kind(
        "LlamaForCausalLM",
        1e-6,
        1e4,
        SILU | NO_BIAS | {"mlp_bias": False},
        windows=False,
    ),
    "mistral": Kind(
        "MistralForCausalLM",
        1e-6,
        1e4,
        SILU,
        needed=("num_key_value_heads", "sliding_window"),
    ),
    "mixtral": Kind(
        "MixtralForCausalLM",
        1e-5,
        1e6,
        SILU | {"router_jitter_noise": 0.0},
        experts=True,
    ),
    "qwen2": Kind(
        "Qwen2ForCausalLM",
        1e-6,
        1e4,
        SILU,
        qkv_bias=True,
        needed=("num_key_value_heads",),
    ),
    "qwen3": Kind(
        "Qwen3ForCausalLM",
        1e-6,
        1e4,
        SILU | NO_BIAS,
        qk_norm=True,
        needed=("num_key_value_heads", "head_dim"),
    ),
}
BY_LAYER = ("qwen2", "qwen3")
"""Types whose layers may differ: some have a window and some have none."""


def kind_of(values: dict[str, Any]) -> str:
    """The `model_type` of a `config.json`; ValueError for one that is not supported."""
    kind = values.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"model_type={kind!r} is none of {', '.join(KINDS)}")
    for name, needed in KINDS[kind].fixed.items():
        if values.get(name, needed) != needed:
            raise ValueError(f"{name}={values[name]!r}, but this model has {needed!r}")
    return kind


def kind_for(config: XtrainConfig, found: str | None = None) -> str:
    """The `model_type` of the files of a model.

    Args:
        found: that of the files it comes from, which stays if it is right.

    Raises:
        ValueError: no model of transformers has these parts together.
    """
    by_layer = config.sliding_window is not None and config.max_window_layers > 0
    fits = [
        name
        for name, kind in KINDS.items()
        if kind.qkv_bias == config.qkv_bias
        and kind.qk_norm == config.qk_norm
        and kind.experts == bool(config.num_local_experts)
        and (kind.windows or config.sliding_window is None)
        and (name in BY_LAYER or not by_layer)
    ]
    if not fits:
        parts = ("qkv_bias", "qk_norm", "sliding_window", "max_window_layers")
        said = {name: getattr(config, name) for name in parts}
        said["num_local_experts"] = config.num_local_experts
        raise ValueError(f"none of {', '.join(KINDS)} has {said}")
    return found if found in fits else fits[0]


def read_windows(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """`sliding_window` and `max_window_layers` of a `config.json`."""
    window = values.get("sliding_window")
    if kind not in BY_LAYER:
        return {"sliding_window": window}
    uses = values.get("use_sliding_window", False)
    if not isinstance(uses, bool):
        raise ValueError(f"use_sliding_window={uses!r} is not a bool")
    if not uses or window is None:
        return {}
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    first = values.get("max_window_layers", 28)
    require_whole("max_window_layers", first, least=0)
    if types is not None:
        full, sliding = "full_attention", "sliding_attention"
        if not isinstance(types, list) or len(types) != layers:
            raise ValueError(f"layer_types is not a list of {layers} layers")
        first = types.index(sliding) if sliding in types else layers
        if types != [full] * first + [sliding] * (layers - first):
            raise ValueError(
                f"layer_types={types}: this model has {full!r} in its first layers and "
                f"{sliding!r} in all others"
            )
    if first >= layers:
        return {}
    return {"sliding_window": window, "max_window_layers": first}


def window_entries(config: XtrainConfig, kind: str) -> dict[str, Any]:
    """The same as entries of a `config.json`."""
    window, layers = config.sliding_window, config.num_hidden_layers
    if not KINDS[kind].windows:
        return {}
    if kind not in BY_LAYER:
        return {"sliding_window": window}
    first = layers if window is None else min(config.max_window_layers, layers)
    types = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": types,
    }
