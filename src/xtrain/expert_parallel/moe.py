"""A mixture of experts in place of a feed-forward network, on one device.

    x [T, H] -> router -> copies sorted by expert -> experts -> weighted sum -> y [T, H]

    y_t = sum_j  gate_tj  expert_{e_tj}(x_t)          over the k experts of a token

    d expert output   gate_tj dy_t                    each gate once
    d gate_tj         dy_t . expert_{e_tj}(x_t)
    dx_t              through its experts, and through the router

Sources: Shazeer et al., 2017; Jiang et al., Mixtral of Experts, 2024; Dai et al.,
DeepSeekMoE, 2024 (many small experts, and shared ones).

Shapes: T tokens, H hidden, E experts, k experts of a token, M kept copies.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.expert_parallel.experts import Experts, RoutedExperts
from xtrain.expert_parallel.router import TopKRouter
from xtrain.expert_parallel.routing import Routing


class MoE(nn.Module):
    """Each token through `top_k` of `num_experts` SwiGLU networks.

    Args:
        intermediate_size: the inner size of each expert.
        shared_intermediate_size: that of an expert which every token goes through
            with a gate of 1; 0 for none.
        backward, path: of the experts, see `expert_mlp`.
        local_experts, kind: how many of the experts are held here, and whether they are
            called with rows, for `GShardMoE`; all unless given, with tokens.
        router_options: see `TopKRouter`.

    Attributes:
        router: with `.stats` of the last forward: loads, drops and auxiliary losses.
        experts: those held here.
        shared: the shared expert, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate_size: int = 0,
        backward: str = "by_hand",
        path: str | None = None,
        local_experts: int | None = None,
        kind: type[Experts] = RoutedExperts,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **router_options: Any,
    ):
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = TopKRouter(
            hidden_size, num_experts, top_k, **router_options, **made
        )
        inner: dict[str, Any] = {"backward": backward, "path": path, **made}
        held = num_experts if local_experts is None else local_experts
        self.experts = kind(held, hidden_size, intermediate_size, **inner)
        self.shared = None
        if shared_intermediate_size:
            self.shared = SharedExpert(hidden_size, shared_intermediate_size, **made)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[..., H] in and out; `mask` [...] is False for padding, whose output is that
        of the shared expert alone."""
        mask_T = None if mask is None else mask.flatten()
        routing = self.router(x.flatten(0, -2), mask_T)
        x, routing = self.before_experts(x, routing)
        x_TH = x.flatten(0, -2)
        y_TH = self.routed(x_TH, routing)
        if self.shared is not None:
            y_TH = y_TH + self.shared(x_TH)
        return self.after_experts(y_TH.view(x.shape))

    def routed(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """What the routed experts add."""
        return self.experts(x_TH, routing)

    def before_experts(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """Tokens and gates as all experts get them: for experts that are cut."""
        return x, routing

    def after_experts(self, y: Tensor) -> Tensor:
        """The sum of all experts as the layer returns it: for experts that are cut."""
        return y


class DeepSeekMoE(MoE):
    """Many small experts chosen by sigmoid scores, and a shared one for every token.

    Loads are kept even by a bias on the choice, not by a loss: after each step call
    `router.update_balance_bias` with the loads of all tokens.

    Args:
        shared_experts: how many shared experts; they are one of as many times the size.
        groups, top_groups, scale: of the router, as DeepSeek-V3 has them.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_experts: int = 1,
        **options: Any,
    ):
        options = {"score": "sigmoid", "balance_bias": True, **options}
        super().__init__(
            hidden_size,
            intermediate_size,
            num_experts,
            top_k,
            shared_intermediate_size=shared_experts * intermediate_size,
            **options,
        )


class SharedExpert(nn.Module):
    """The SwiGLU network that every token goes through."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.size = intermediate_size
        made: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **made)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **made)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **made)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] in and out."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
