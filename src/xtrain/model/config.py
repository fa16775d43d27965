"""The config of a model: its sizes, and the constants of positions, norms and routers.

Fields are named as in the `config.json` of a Llama, Mixtral or DeepSeek checkpoint.
"""

import dataclasses
from dataclasses import dataclass

from xtrain.expert_parallel.router import check_router
from xtrain.plan import ModelShape
from xtrain.plan.checks import require_positive, require_whole
from xtrain.tensor_parallel.rope import RopeScaling


@dataclass(frozen=True, kw_only=True)
class XtrainConfig(ModelShape):
    """The sizes of `ModelShape`, and the other constants of an `XtrainModel`.

    Args:
        rope_theta: the base of the rotary frequencies.
        rope_scaling: None for plain rotary positions.
        rms_norm_eps: keeps a norm from dividing by zero.
        sliding_window: a token sees itself and the `sliding_window - 1` before it; all
            tokens before it if None.
        max_window_layers: so many layers, the first ones, have no window.
        attention_dropout: the probability that a probability of attention becomes 0
            in training.
        padded_vocab_size: rows of embedding and head, if more than the vocabulary: the
            last ones are no token, stay zero and have no part in the loss. It must be
            a multiple of the tensor ranks.
        initializer_range: the standard deviation of all matrices at the start.
        seed: of the weights; each parameter's own seed comes from it and its name.
        scoring_func: of the router's logits, "softmax" or "sigmoid".
        norm_topk_prob: the gates of a token are divided by their sum.
        routed_scaling_factor: a factor of the gates.
        n_group, topk_group: experts form `n_group` groups of equal size, and those of a
            token are chosen from its best `topk_group` groups.
        balance_bias: the routers keep a bias, which `update_balance_biases` changes
            after a step, so that experts get equally many tokens.
        router_aux_loss_coef: how much of the load-balancing loss is added to the loss.
        router_aux_loss_pooled: that loss is of the tokens of all layers together, as
            transformers has it; otherwise it is the mean of the layers' own losses.
        router_sequence_loss_coef: how much of the loss of each sequence by itself.
        router_z_loss_coef: how much of the routers' z-loss.
    """

    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    max_window_layers: int = 0
    attention_dropout: float = 0.0
    padded_vocab_size: int | None = None
    initializer_range: float = 0.02
    seed: int = 0
    scoring_func: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    balance_bias: bool = False
    router_aux_loss_coef: float = 0.0
    router_aux_loss_pooled: bool = False
    router_sequence_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd: rotary positions turn pairs"
            )
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            require_positive(name, getattr(self, name))
        require_whole("seed", self.seed, least=0)
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(
                f"rope_scaling={self.rope_scaling!r} is neither RopeScaling nor None"
            )
        self._check_attention()
        least = self.vocab_size
        if self.padded_vocab_size is not None:
            require_whole("padded_vocab_size", self.padded_vocab_size, least=least)
        self._check_router()

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head: the vocabulary and its padding."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def padding_from(self) -> int | None:
        """The first of the rows that are no token; None where there are none."""
        return self.vocab_size if self.vocab_rows > self.vocab_size else None

    def window_of(self, layer: int) -> int | None:
        """The sliding window of the layer with this number."""
        return self.sliding_window if layer >= self.max_window_layers else None

    def _check_attention(self) -> None:
        if self.sliding_window is not None:
            require_whole("sliding_window", self.sliding_window)
        require_whole("max_window_layers", self.max_window_layers, least=0)
        p = self.attention_dropout
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
            raise ValueError(f"attention_dropout={p!r} is not between 0 and 1")

    def _check_router(self) -> None:
        """ValueError for options of routers that do not fit, or of a dense model."""
        if not self.num_local_experts:
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name in ROUTER and value != field.default:
                    raise ValueError(
                        f"{field.name}={value!r} of a model without experts: "
                        "num_local_experts=0"
                    )
            return
        for name in ("norm_topk_prob", "balance_bias", "router_aux_loss_pooled"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a bool")
        for name in LOSSES:
            if getattr(self, name) != 0:
                require_positive(name, getattr(self, name))
        require_positive("routed_scaling_factor", self.routed_scaling_factor)
        experts, top_k = self.num_local_experts, self.num_experts_per_tok
        for name in ("n_group", "topk_group"):
            require_whole(name, getattr(self, name))
        groups = self.n_group, self.topk_group
        check_router(experts, top_k, self.scoring_func, *groups)


def padded_for(config: XtrainConfig, tensor_ranks: int) -> XtrainConfig:
    """The config with as many rows of embedding and head as the ranks can share."""
    if config.vocab_rows % tensor_ranks == 0:
        return config
    rows = -(-config.vocab_size // tensor_ranks) * tensor_ranks
    return dataclasses.replace(config, padded_vocab_size=rows)


LOSSES = "router_aux_loss_coef", "router_sequence_loss_coef", "router_z_loss_coef"
"""Coefficients of what routers add to the loss."""
ROUTER = {
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "balance_bias",
    "router_aux_loss_pooled",
    *LOSSES,
}
"""Fields of routers alone."""
