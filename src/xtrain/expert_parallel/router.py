"""The router: one matrix scores the experts, and each token takes its top k.

    x [T, H] -- weight [E, H] --> logits [T, E] --> scores --> top k --> gates [T, k]

    softmax   scores compete: one rises, the others fall
    sigmoid   each score is its own; renormalised gates bring the competition back

Scores are computed in fp32 at least. With groups, only the best `top_groups` groups of
experts may be chosen from, so that a token goes to few nodes: the score of a group is
the sum of its best top_k / top_groups scores. A balance bias is added to the scores
for the choice alone.

Sources: Shazeer et al., 2017; Jiang et al., Mixtral of Experts, 2024 (softmax, top-k,
renormalise); DeepSeek-AI, DeepSeek-V3, 2024 (sigmoid, groups, bias).

Shapes: T tokens, H hidden, E experts, k experts of a token, G groups.
"""

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.comm.autocast import without_autocast
from xtrain.expert_parallel.balance import (
    load_balancing_loss,
    router_z_loss,
    update_balance_bias,
)
from xtrain.expert_parallel.routing import Routing, within_capacity
from xtrain.plan.experts import expert_capacity


class RouterStats:
    """What a router did in its last forward; losses are computed when they are read."""

    def __init__(self, routing: Routing):
        self.routing = routing

    @property
    def tokens(self) -> int:
        """How many, without padding."""
        mask_T = self.routing.mask_T
        return len(self.routing.experts_Tk) if mask_T is None else int(mask_T.sum())

    @property
    def counts_E(self) -> Tensor:
        """Copies that each expert computed."""
        return self.routing.counts_E

    @property
    def dropped(self) -> int:
        """Copies above the capacity of their expert."""
        return self.routing.dropped

    @property
    def load_balancing_loss(self) -> Tensor:
        """Of this rank's tokens; differentiable."""
        routing = self.routing
        return load_balancing_loss(
            routing.probabilities_TE, routing.experts_Tk, mask_T=routing.mask_T
        )

    @property
    def z_loss(self) -> Tensor:
        """Of this rank's tokens; differentiable."""
        return router_z_loss(self.routing.logits_TE, mask_T=self.routing.mask_T)


class TopKRouter(nn.Module):
    """Chooses `top_k` of `num_experts` experts for each token.

    Args:
        score: "softmax" over all experts, or "sigmoid" of each.
        renormalize: divide the gates of a token by their sum.
        scale: a factor of the gates.
        groups, top_groups: experts form `groups` groups of equal size, and those of a
            token are chosen from its best `top_groups` of them.
        capacity_factor: None for no limit (dropless); else see `expert_capacity`.
        balance_bias: keep a bias for the choice, which `update_balance_bias` changes.

    Attributes:
        weight: [E, H].
        balance_bias: [E], a buffer of at least fp32, or None.
        stats: of the last forward, or None.

    Raises:
        ValueError: options that do not fit each other.
    """

    balance_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        capacity_factor: float | None = None,
        balance_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_router(num_experts, top_k, score, groups, top_groups)
        if capacity_factor is not None:
            expert_capacity(1, num_experts, top_k, capacity_factor)
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.score, self.renormalize, self.scale = score, renormalize, scale
        self.groups, self.top_groups = groups, top_groups
        self.capacity_factor = capacity_factor
        self.weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )
        bias = None
        if balance_bias:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            bias = torch.zeros(num_experts, device=device, dtype=wide)
        self.register_buffer("balance_bias", bias)
        self.stats: RouterStats | None = None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """The keyword arguments that make another router like this one."""
        return {
            "score": self.score,
            "renormalize": self.renormalize,
            "scale": self.scale,
            "groups": self.groups,
            "top_groups": self.top_groups,
            "capacity_factor": self.capacity_factor,
            "balance_bias": self.balance_bias is not None,
        }

    def reset_parameters(self) -> None:
        """As `nn.Linear` begins."""
        nn.init.kaiming_uniform_(self.weight, math.sqrt(5))

    def forward(self, x_TH: Tensor, mask_T: Tensor | None = None) -> Routing:
        """The experts of each token; `mask_T` is False for padding, which has none."""
        check_tokens(x_TH, self.hidden_size, mask_T)
        with without_autocast(x_TH.device.type):
            wide = torch.promote_types(x_TH.dtype, torch.float32)
            logits_TE = F.linear(x_TH.to(wide), self.weight.to(wide))
            scores_TE = (
                logits_TE.softmax(-1)
                if self.score == "softmax"
                else logits_TE.sigmoid()
            )
            experts_Tk = self.choose(scores_TE.detach())
            gates_Tk = scores_TE.gather(1, experts_Tk)
            if self.renormalize:
                tiny = torch.finfo(wide).tiny
                gates_Tk = gates_Tk / (gates_Tk.sum(-1, keepdim=True) + tiny)
            if self.scale != 1:
                gates_Tk = gates_Tk * self.scale
            probabilities_TE = scores_TE
            if self.score == "sigmoid":
                probabilities_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        kept_Tk = self.keep(experts_Tk, mask_T)
        routing = Routing(
            experts_Tk, gates_Tk, probabilities_TE, logits_TE, kept_Tk, mask_T
        )
        self.stats = RouterStats(routing)
        return routing

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The experts of each token, best first: [T, k]."""
        if self.balance_bias is not None:
            scores_TE = scores_TE + self.balance_bias.to(scores_TE.dtype)
        if self.groups > 1:
            scores_TE = keep_best_groups(
                scores_TE, self.groups, self.top_groups, self.top_k
            )
        return scores_TE.topk(self.top_k, dim=-1).indices

    def keep(self, experts_Tk: Tensor, mask_T: Tensor | None) -> Tensor:
        """Which copies are computed: those of real tokens, within the capacity."""
        kept_Tk = torch.ones_like(experts_Tk, dtype=torch.bool)
        tokens = len(experts_Tk)
        if mask_T is not None:
            kept_Tk &= mask_T[:, None]
            tokens = int(mask_T.sum()) if self.capacity_factor is not None else 0
        if self.capacity_factor is None:
            return kept_Tk
        sizes = tokens, self.num_experts, self.top_k, self.capacity_factor
        capacity = expert_capacity(*sizes)
        return within_capacity(experts_Tk, self.num_experts, capacity, kept_Tk)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As torch's, but the bias stays in at least fp32: 16 bits lose its steps."""
        bias = self.balance_bias
        super()._apply(fn, recurse)
        cast = self.balance_bias
        if bias is not None and cast is not None and cast.dtype.itemsize < 4:
            self.balance_bias = bias.to(cast.device)
        return self

    def update_balance_bias(self, counts_E: Tensor, rate: float = 1e-3) -> None:
        """After a step: `counts_E` are the copies of all tokens of it, on all ranks."""
        if self.balance_bias is None:
            raise ValueError(
                "this router has no balance bias: balance_bias=True adds it"
            )
        update_balance_bias(self.balance_bias, counts_E, rate)

    def __getstate__(self) -> dict[str, Any]:
        """Without the statistics: they hold a graph, which cannot be copied."""
        return {**self.__dict__, "stats": None}


def keep_best_groups(
    scores_TE: Tensor, groups: int, top_groups: int, top_k: int
) -> Tensor:
    """The scores, with minus infinity for experts outside a token's best groups."""
    scores_TGe = scores_TE.unflatten(-1, (groups, -1))
    judged_by = max(1, top_k // top_groups)
    value_TG = scores_TGe.topk(judged_by, dim=-1).values.sum(-1)
    chosen_TG = torch.zeros_like(value_TG, dtype=torch.bool)
    chosen_TG.scatter_(1, value_TG.topk(top_groups, dim=-1).indices, True)
    return scores_TGe.masked_fill(~chosen_TG[..., None], -math.inf).flatten(1)


def check_router(
    num_experts: int, top_k: int, score: str, groups: int, top_groups: int
) -> None:
    """ValueError unless these options fit each other."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} of num_experts={num_experts}: needs 1 to E")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score={score!r} is neither 'softmax' nor 'sigmoid'")
    if groups < 1 or num_experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(
            f"groups={groups}, top_groups={top_groups}: {num_experts} experts need "
            "groups of equal size, and 1 to all of these to choose from"
        )
    size = num_experts // groups
    if top_groups * size < top_k or max(1, top_k // top_groups) > size:
        raise ValueError(
            f"top_k={top_k} does not fit into top_groups={top_groups} groups of "
            f"{size} experts"
        )


def check_tokens(x_TH: Tensor, hidden_size: int, mask_T: Tensor | None) -> None:
    """ValueError unless tokens have this size, and the mask their number."""
    if x_TH.dim() != 2 or x_TH.shape[1] != hidden_size:
        raise ValueError(
            f"tokens of shape {list(x_TH.shape)}: needs [T, {hidden_size}]"
        )
    if not x_TH.is_floating_point():
        raise ValueError(f"tokens are {x_TH.dtype}, not a floating-point dtype")
    if mask_T is None:
        return
    if mask_T.dtype != torch.bool or mask_T.shape != x_TH.shape[:1]:
        raise ValueError(
            f"mask of shape {list(mask_T.shape)} and {mask_T.dtype}: needs bool "
            f"[{len(x_TH)}]"
        )
