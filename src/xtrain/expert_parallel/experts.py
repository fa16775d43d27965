"""Experts: several SwiGLU networks, run on rows that are sorted by expert.

    a = x gate^T    u = x up^T    z = silu(a) u    y = z down^T       forward

    dz = dy down        ddown = dy^T z                                backward
    du = dz silu(a)     dup   = du^T x
    da = dz u silu'(a)  dgate = da^T x
    dx = da gate + du up

silu(a) = a s with s = sigmoid(a), so silu'(a) = s (1 + a (1 - s)), which torch has as
one kernel. Forward keeps x, a and u; z is computed again in backward. Autograd
finds the same: see `expert_mlp(..., backward="autograd")`.

Source: Shazeer, GLU Variants Improve Transformer, 2020.

Shapes: N rows, H hidden, F inner size, E experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xtrain.comm.autocast import cast_by_autocast
from xtrain.expert_parallel.grouped import Rows, rows_of
from xtrain.expert_parallel.routing import Routing, sort_copies, weighted_sum

SILU_BACKWARD: Any = torch.ops.aten.silu_backward
"""(dz, a) -> dz silu'(a)."""


@dataclass
class SavedExperts:
    """What forward keeps for backward, as `rows` packs it."""

    rows: Rows
    x: Tensor
    a: Tensor
    u: Tensor
    weights: tuple[Tensor, Tensor, Tensor]


def expert_mlp_forward(
    x_NH: Tensor,
    counts_E: Tensor,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    path: str | None = None,
) -> tuple[Tensor, SavedExperts]:
    """Each row through its expert: [N, H], and what backward needs."""
    rows = rows_of(counts_E, x_NH, gate_EFH.shape[1], path)
    x = rows.pack(x_NH)
    a, u = rows.linear(x, gate_EFH), rows.linear(x, up_EFH)
    y = rows.linear(F.silu(a) * u, down_EHF)
    return rows.unpack(y), SavedExperts(rows, x, a, u, (gate_EFH, up_EFH, down_EHF))


def expert_mlp_backward(
    grad_NH: Tensor, saved: SavedExperts
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, gate, up and down."""
    rows, x, a, u = saved.rows, saved.x, saved.a, saved.u
    gate_EFH, up_EFH, down_EHF = saved.weights
    dy = rows.pack(grad_NH)
    silu = F.silu(a)
    dz = rows.input_gradient(dy, down_EHF)
    ddown_EHF = rows.weight_gradient(dy, silu * u)
    du = silu.mul_(dz)
    da = SILU_BACKWARD(dz.mul_(u), a)
    dx = rows.input_gradient(da, gate_EFH)
    dx = rows.input_gradient(du, up_EFH, onto=dx)
    dgate_EFH, dup_EFH = rows.weight_gradient(da, x), rows.weight_gradient(du, x)
    return rows.unpack(dx), dgate_EFH, dup_EFH, ddown_EHF


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        counts_E: Tensor,
        gate_EFH: Tensor,
        up_EFH: Tensor,
        down_EHF: Tensor,
        path: str | None,
    ) -> Tensor:
        weights = gate_EFH, up_EFH, down_EHF
        y_NH, saved = expert_mlp_forward(x_NH, counts_E, *weights, path)
        ctx.rows = saved.rows
        ctx.save_for_backward(saved.x, saved.a, saved.u, *weights)
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        x, a, u, *weights = ctx.saved_tensors
        saved = SavedExperts(ctx.rows, x, a, u, tuple(weights))
        dx, *dweights = expert_mlp_backward(grad_NH.contiguous(), saved)
        return dx, None, *dweights, None


def expert_mlp(
    x_NH: Tensor,
    counts_E: Tensor,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    path: str | None = None,
    backward: str = "by_hand",
) -> Tensor:
    """The first `counts_E[0]` rows through expert 0, the next through expert 1, ...

    Args:
        path: "loop", "padded" or "grouped"; chosen by size unless given.
        backward: "by_hand", as above, or "autograd", which needs no path: it runs the
            loop with torch's functions.
    """
    tensors = x_NH, gate_EFH, up_EFH, down_EHF
    x_NH, gate_EFH, up_EFH, down_EHF = cast_by_autocast(*tensors)
    if backward == "by_hand":
        return _ExpertMLP.apply(x_NH, counts_E, gate_EFH, up_EFH, down_EHF, path)
    sizes = counts_E.tolist()
    outputs = [
        F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        for x, gate, up, down in zip(
            x_NH.split(sizes), gate_EFH, up_EFH, down_EHF, strict=True
        )
    ]
    return torch.cat(outputs)


class _RoutedMLP(torch.autograd.Function):
    """Copies of tokens through their experts, and each token's weighted sum.

    Forward keeps the experts' outputs, in the order of the [T, k] table: the gradient
    of a gate is the product of dy of its token with that output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        gates_Tk: Tensor,
        copies_M: Tensor,
        counts_E: Tensor,
        gate_EFH: Tensor,
        up_EFH: Tensor,
        down_EHF: Tensor,
        path: str | None,
    ) -> Tensor:
        weights = gate_EFH, up_EFH, down_EHF
        rows_MH = x_TH.index_select(0, copies_M // gates_Tk.shape[1])
        out_MH, saved = expert_mlp_forward(rows_MH, counts_E, *weights, path)
        out_TkH = to_table(out_MH, copies_M, gates_Tk.shape)
        ctx.rows = saved.rows
        ctx.save_for_backward(
            gates_Tk, copies_M, out_TkH, saved.x, saved.a, saved.u, *weights
        )
        gates_T1k = gates_Tk.to(out_TkH.dtype).unsqueeze(1)
        return torch.bmm(gates_T1k, out_TkH).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        gates_Tk, copies_M, out_TkH, x, a, u, *weights = ctx.saved_tensors
        saved = SavedExperts(ctx.rows, x, a, u, tuple(weights))
        grad_T1H = grad_TH[:, None]
        dgates_Tk = (grad_T1H * out_TkH).sum(-1, dtype=gates_Tk.dtype)
        dout_TkH = grad_T1H * gates_Tk[..., None].to(grad_TH.dtype)
        dout_MH = dout_TkH.flatten(0, 1).index_select(0, copies_M)
        drows_MH, *dweights = expert_mlp_backward(dout_MH, saved)
        dx_TH = to_table(drows_MH, copies_M, gates_Tk.shape).sum(1)
        return dx_TH, dgates_Tk, None, None, *dweights, None


def to_table(rows_MH: Tensor, copies_M: Tensor, shape: torch.Size) -> Tensor:
    """Rows at the places `copies_M` of a [T, k] table of rows; zeros elsewhere."""
    places = shape.numel()
    new = rows_MH.new_empty if len(rows_MH) == places else rows_MH.new_zeros
    table = new(places, rows_MH.shape[1]).index_copy_(0, copies_M, rows_MH)
    return table.view(*shape, rows_MH.shape[1])


def routed_mlp(
    x_TH: Tensor,
    gates_Tk: Tensor,
    copies_M: Tensor,
    counts_E: Tensor,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    path: str | None = None,
) -> Tensor:
    """Each token's copies through their experts and their weighted sum, by hand.

    Equals `expert_mlp` between an index and `weighted_sum`.

    Args:
        copies_M: the kept copies sorted by expert, see `sort_copies`.
        counts_E: how many each expert has.
    """
    tensors = x_TH, gate_EFH, up_EFH, down_EHF
    x_TH, *weights = cast_by_autocast(*tensors)
    return _RoutedMLP.apply(x_TH, gates_Tk, copies_M, counts_E, *weights, path)


class Experts(nn.Module):
    """The weights of several experts, one tensor for each of the three matrices.

    Args:
        num_experts: how many are held.
        backward, path: as in `expert_mlp`.

    Attributes:
        gate_proj, up_proj: [E, F, H], each expert's as `nn.Linear` has it.
        down_proj: [E, H, F].
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        backward: str = "by_hand",
        path: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_experts(num_experts, hidden_size, intermediate_size, backward)
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size = intermediate_size
        self.backward, self.path = backward, path
        up = num_experts, intermediate_size, hidden_size
        down = num_experts, hidden_size, intermediate_size
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Parameter(torch.empty(*up, **made))
        self.up_proj = nn.Parameter(torch.empty(*up, **made))
        self.down_proj = nn.Parameter(torch.empty(*down, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert's matrices as `nn.Linear` begins."""
        for weight in self.parameters():
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x_NH: Tensor, counts_E: Tensor) -> Tensor:
        """Rows [N, H] sorted by expert, in and out, and how many each expert has."""
        weights = self.gate_proj, self.up_proj, self.down_proj
        return expert_mlp(x_NH, counts_E, *weights, self.path, self.backward)


class RoutedExperts(Experts):
    """All experts of a layer: called with tokens and their routing."""

    def forward(self, x_TH: Tensor, routing: Routing) -> Tensor:  # type: ignore[override]
        """Each token's copies through their experts, and their weighted sum: [T, H]."""
        counts_E, gates_Tk = routing.counts_E, routing.gates_Tk
        copies_M = sort_copies(routing.experts_Tk, routing.kept_Tk, counts_E)
        weights = self.gate_proj, self.up_proj, self.down_proj
        if self.backward == "by_hand":
            return routed_mlp(x_TH, gates_Tk, copies_M, counts_E, *weights, self.path)
        rows_MH = super().forward(x_TH[copies_M // gates_Tk.shape[1]], counts_E)
        return weighted_sum(rows_MH, gates_Tk, copies_M)


def check_experts(
    num_experts: int, hidden_size: int, intermediate_size: int, backward: str
) -> None:
    """ValueError for sizes below 1 and an unknown backward."""
    sizes = {
        "num_experts": num_experts,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} is not an int of at least 1")
    if backward not in ("by_hand", "autograd"):
        raise ValueError(f"backward={backward!r} is neither 'by_hand' nor 'autograd'")
