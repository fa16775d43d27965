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
        router_z_loss_coef: how much of the routers' z-loss.
    """

    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
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
        self._check_router()

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
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            if getattr(self, name) != 0:
                require_positive(name, getattr(self, name))
        require_positive("routed_scaling_factor", self.routed_scaling_factor)
        experts, top_k = self.num_local_experts, self.num_experts_per_tok
        for name in ("n_group", "topk_group"):
            require_whole(name, getattr(self, name))
        groups = self.n_group, self.topk_group
        check_router(experts, top_k, self.scoring_func, *groups)


ROUTER = {
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "balance_bias",
    "router_aux_loss_coef",
    "router_aux_loss_pooled",
    "router_z_loss_coef",
}
"""Fields of routers alone."""
