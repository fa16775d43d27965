"""MoE layer, forward: sort the copies by expert, a matrix product for each expert.

    x [T, H] -> k copies, sorted -> SwiGLU of each expert -> gates, sum -> y [T, H]

Computes:   the layer's output, and what `moe_backward` needs.
Sends:      nothing: one device has all experts.
Leaves out: capacity, shared experts, a grouped matrix product, checks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def moe_forward(
    x_TH: Tensor,
    router_weight_EH: Tensor,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    top_k: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Softmax over all experts, the k largest, divided by their sum."""
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    scores_TE = F.linear(x_TH.to(wide), router_weight_EH.to(wide)).softmax(-1)
    values_Tk, experts_Tk = scores_TE.topk(top_k)
    gates_Tk = values_Tk / values_Tk.sum(-1, keepdim=True)

    order_N = experts_Tk.flatten().argsort(stable=True)  # copies, expert by expert
    token_N = order_N // top_k  # copy n is of token n // k
    counts_E = torch.bincount(experts_Tk.flatten(), minlength=len(gate_EFH))
    x_NH = x_TH[token_N]
    rows, outputs = x_NH.split(counts_E.tolist()), []
    for x, gate, up, down in zip(rows, gate_EFH, up_EFH, down_EHF, strict=True):
        inner = F.silu(F.linear(x, gate)) * F.linear(x, up)
        outputs.append(F.linear(inner, down))
    y_NH = torch.empty_like(x_NH)
    y_NH[order_N] = torch.cat(outputs)  # in the order of the tokens, k rows for each
    weights_Tk1 = gates_Tk.unsqueeze(-1).to(x_TH.dtype)
    y_TH = (y_NH.unflatten(0, gates_Tk.shape) * weights_Tk1).sum(1)
    weights = router_weight_EH, gate_EFH, up_EFH, down_EHF
    return y_TH, (x_TH, *weights, scores_TE, experts_Tk, gates_Tk)
