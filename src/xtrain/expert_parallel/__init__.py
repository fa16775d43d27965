"""lc7: mixtures of experts, and experts on several ranks."""

from xtrain.expert_parallel.balance import (
    load_balancing_loss,
    router_z_loss,
    sequence_balance_loss,
    update_balance_bias,
)
from xtrain.expert_parallel.dispatch import (
    DispatchPlan,
    combine,
    dispatch,
    plan_dispatch,
)
from xtrain.expert_parallel.expert_placement import (
    ExpertPlacement,
    Move,
    plan_placement,
)
from xtrain.expert_parallel.experts import (
    Experts,
    expert_mlp,
    expert_mlp_backward,
    expert_mlp_forward,
)
from xtrain.expert_parallel.gshard import GShardMoE
from xtrain.expert_parallel.moe import DeepSeekMoE, MoE
from xtrain.expert_parallel.moe_by_hand import moe_backward, moe_forward
from xtrain.expert_parallel.overlap import OverlappedMoEBlock, overlapped_prefill
from xtrain.expert_parallel.router import TopKRouter
from xtrain.expert_parallel.routing import Routing, top_k_gradient, within_capacity
from xtrain.plan.experts import expert_capacity

__all__ = [
    "DeepSeekMoE",
    "DispatchPlan",
    "ExpertPlacement",
    "Experts",
    "GShardMoE",
    "MoE",
    "OverlappedMoEBlock",
    "Move",
    "Routing",
    "TopKRouter",
    "combine",
    "dispatch",
    "expert_capacity",
    "expert_mlp",
    "expert_mlp_backward",
    "expert_mlp_forward",
    "load_balancing_loss",
    "moe_backward",
    "moe_forward",
    "overlapped_prefill",
    "plan_dispatch",
    "plan_placement",
    "router_z_loss",
    "sequence_balance_loss",
    "top_k_gradient",
    "update_balance_bias",
    "within_capacity",
]
