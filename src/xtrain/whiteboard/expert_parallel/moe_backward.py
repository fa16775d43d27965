"""MoE layer, backward: through the experts, and through the gates to the router.

    dy of a token goes to its k copies      d gate = dy . y of the expert, for one copy

Computes:   the gradients of x, of the router's weight and of all experts' weights.
Sends:      nothing: one device has all experts.
Leaves out: auxiliary losses, other scores than softmax, a grouped product, checks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def moe_backward(grad_TH: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What `moe_forward` saved; what is inside an expert is computed again."""
    x_TH, router_EH, gate_EFH, up_EFH, down_EHF, scores_TE, experts_Tk, gates_Tk = saved
    order_N = experts_Tk.flatten().argsort(stable=True)
    token_N = order_N // experts_Tk.shape[1]  # copy n is of token n // k
    counts = torch.bincount(experts_Tk.flatten(), minlength=len(gate_EFH)).tolist()
    gates_N1 = gates_Tk.flatten()[order_N, None].to(x_TH.dtype)
    sorted_N = x_TH[token_N], grad_TH[token_N], gates_N1
    dgate_EFH, dup_EFH, ddown_EHF = map(torch.zeros_like, (gate_EFH, up_EFH, down_EHF))
    dx_NH, dgates_N = torch.empty_like(sorted_N[0]), torch.empty_like(gates_N1[:, 0])

    parts = [t.split(counts) for t in (*sorted_N, dx_NH, dgates_N)]
    for e, (x, dy, weight, dx, dweight) in enumerate(zip(*parts, strict=True)):
        a, b = F.linear(x, gate_EFH[e]), F.linear(x, up_EFH[e])
        sigma = a.sigmoid()
        inner = a * sigma * b  # silu(a) b
        d_inner = dy @ down_EHF[e]
        dweight.copy_((d_inner * inner).sum(-1))  # is dy . (down inner)
        d_inner = d_inner * weight
        da, db = d_inner * b * sigma * (1 + a * (1 - sigma)), d_inner * a * sigma
        dgate_EFH[e], dup_EFH[e] = da.mT @ x, db.mT @ x
        ddown_EHF[e] = (dy * weight).mT @ inner
        dx.copy_(da @ gate_EFH[e] + db @ up_EFH[e])

    back_NH, dgates_Tk = torch.empty_like(dx_NH), torch.empty_like(gates_Tk)
    back_NH[order_N] = dx_NH
    dgates_Tk.view(-1)[order_N] = dgates_N.to(gates_Tk.dtype)
    # The chosen scores divided by their sum are the softmax of the chosen logits.
    dlogits_Tk = gates_Tk * (dgates_Tk - (dgates_Tk * gates_Tk).sum(-1, keepdim=True))
    dlogits_TE = torch.zeros_like(scores_TE).scatter(1, experts_Tk, dlogits_Tk)
    drouter_EH = dlogits_TE.mT @ x_TH.to(dlogits_TE.dtype)
    dx_TH = back_NH.unflatten(0, experts_Tk.shape).sum(1)
    dx_TH += (dlogits_TE @ router_EH.to(dlogits_TE.dtype)).to(dx_TH.dtype)
    grads = drouter_EH.to(router_EH.dtype), dgate_EFH, dup_EFH, ddown_EHF
    return dx_TH, *grads
