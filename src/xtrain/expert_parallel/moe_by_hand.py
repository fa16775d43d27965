"""The whole layer by hand: forward, and backward without autograd.

    router    logits = x W^T   p = softmax(logits)   e = top k   g = p_e / sum p_e
    experts   o_tj = expert_{e_tj}(x_t)              y_t = sum_j g_tj o_tj

    dg_tj = dy_t . o_tj
    dp_e  = (dg_tj - sum_j dg_tj g_tj) / sum p_e     renormalising
    dp    = scatter of dp_e                          the gradient of top k
    dlogits = p (dp - sum_i dp_i p_i)                softmax
    dW    = dlogits^T x
    dx    = dlogits W + dx of the experts            both branches

Shapes: T tokens, H hidden, F inner size, E experts, k experts of a token, M copies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xtrain.expert_parallel.experts import (
    SavedExperts,
    expert_mlp_backward,
    expert_mlp_forward,
)
from xtrain.expert_parallel.routing import (
    count_experts,
    sort_copies,
    top_k_gradient,
)


@dataclass
class SavedMoE:
    """What `moe_forward` keeps for `moe_backward`."""

    x_TH: Tensor
    weight_EH: Tensor
    probabilities_TE: Tensor
    experts_Tk: Tensor
    gates_Tk: Tensor
    copies_M: Tensor
    rows_MH: Tensor
    of_experts: SavedExperts


def moe_forward(
    x_TH: Tensor,
    router_weight_EH: Tensor,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    top_k: int,
) -> tuple[Tensor, SavedMoE]:
    """y [T, H] of a dropless layer with softmax scores and renormalised gates."""
    probabilities_TE = (x_TH @ router_weight_EH.t()).softmax(-1)
    chosen_Tk, experts_Tk = probabilities_TE.topk(top_k, dim=-1)
    gates_Tk = chosen_Tk / chosen_Tk.sum(-1, keepdim=True)
    counts_E = count_experts(experts_Tk, len(router_weight_EH))
    copies_M = sort_copies(
        experts_Tk, torch.ones_like(experts_Tk, dtype=torch.bool), counts_E
    )
    weights = gate_EFH, up_EFH, down_EHF
    rows_MH, of_experts = expert_mlp_forward(
        x_TH[copies_M // top_k], counts_E, *weights
    )
    weighted_MH = rows_MH * gates_Tk.flatten()[copies_M, None]
    y_TH = torch.zeros_like(x_TH).index_add_(0, copies_M // top_k, weighted_MH)
    return y_TH, SavedMoE(
        x_TH, router_weight_EH, probabilities_TE, experts_Tk, gates_Tk, copies_M,
        rows_MH, of_experts,
    )  # fmt: skip


def moe_backward(grad_TH: Tensor, saved: SavedMoE) -> tuple[Tensor, ...]:
    """The gradients of x, the router's weight, gate, up and down."""
    k = saved.experts_Tk.shape[1]
    tokens_M = saved.copies_M // k
    gates_M = saved.gates_Tk.flatten()[saved.copies_M]
    grad_MH = grad_TH[tokens_M]
    dx_MH, *dweights = expert_mlp_backward(grad_MH * gates_M[:, None], saved.of_experts)
    dgates_Tk = torch.empty_like(saved.gates_Tk)
    dgates_Tk.view(-1)[saved.copies_M] = (grad_MH * saved.rows_MH).sum(-1)
    dlogits_TE = router_gradient(
        dgates_Tk, saved.gates_Tk, saved.experts_Tk, saved.probabilities_TE
    )
    dx_TH = dlogits_TE @ saved.weight_EH
    dx_TH.index_add_(0, tokens_M, dx_MH)
    return dx_TH, dlogits_TE.t() @ saved.x_TH, *dweights


def router_gradient(
    dgates_Tk: Tensor, gates_Tk: Tensor, experts_Tk: Tensor, probabilities_TE: Tensor
) -> Tensor:
    """The gradient of the logits from that of renormalised gates: [T, E]."""
    total_T1 = probabilities_TE.gather(1, experts_Tk).sum(-1, keepdim=True)
    mean_T1 = (dgates_Tk * gates_Tk).sum(-1, keepdim=True)
    dchosen_Tk = (dgates_Tk - mean_T1) / total_T1
    dp_TE = top_k_gradient(dchosen_Tk, experts_Tk, probabilities_TE.shape[1])
    p_TE = probabilities_TE
    return p_TE * (dp_TE - (dp_TE * p_TE).sum(-1, keepdim=True))
