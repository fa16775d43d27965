"""Small configs of the model, odd wherever a size may be odd."""

from xtrain.model import RopeScaling, XtrainConfig

VOCABULARY = 11
ODD = {
    "vocab_size": VOCABULARY,
    "hidden_size": 7,
    "intermediate_size": 9,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 6,
    "initializer_range": 0.4,  # at 0.02 so small a model does not see its attention
}
# The wavelengths of 3 pairs are 6, 63 and 628: one kept, one on the ramp, one slowed.
STRETCHED = RopeScaling(factor=5.0, original_max_position_embeddings=120)

CONFIGS = {
    "as many key heads": {},
    "two for one": {"num_key_value_heads": 2},
    "four for one": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "one key head": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "one head": {"num_attention_heads": 1, "head_dim": 2, "num_hidden_layers": 1},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "biases": {"num_key_value_heads": 2, "qkv_bias": True},
    "norms of heads": {"num_key_value_heads": 2, "qk_norm": True},
    "window": {"sliding_window": 2, "max_window_layers": 1},
    "Llama 3.1": {"num_key_value_heads": 2, "rope_theta": 1000.0,
                  "rope_scaling": STRETCHED},
}  # fmt: skip


EXPERTS = {
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "DeepSeek": {
        "num_hidden_layers": 3,
        "num_local_experts": 6,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 5,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "n_group": 3,
        "topk_group": 2,
    },
    "gates as they are": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
    },
}


def config_of(name: str, **changes) -> XtrainConfig:
    return XtrainConfig(**(ODD | (CONFIGS | EXPERTS)[name] | changes))
