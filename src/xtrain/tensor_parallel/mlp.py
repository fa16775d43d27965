"""MLPs cut over the ranks of a group.

    SwiGLU     x replicated -> gate, up: columns -> silu(gate) * up on this rank's slice
               of the inner size -> down: rows, summed over ranks
    AllGather  x replicated -> up: columns -> all-gather -> activation -> down: columns
               -> all-gather

Gate and up read the same x, so their gradients are added before one all-reduce of dX.
The second form is right and wasteful: a column layer followed by a row layer needs no
gathering between the two. Elements that a rank sends per token, times (N-1)/N, for
h -> 4h -> h:

                       forward                      backward
    both columns       4h + h = 5h                  dX of both summed: 2 (4h + h) = 10h
    column, then row   the sum of the output: 2h    the sum of dX: 2h

Sources: Shoeybi et al., Megatron-LM, 2019 (which compares the two forms); Shazeer, GLU
Variants Improve Transformer, 2020.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.tensor_parallel.functions import (
    Overlap,
    column_linear,
    gradients_by_autograd,
)
from xtrain.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from xtrain.tensor_parallel.shards import (
    bare_weight,
    check_features,
    layer_of,
    placed_as,
    share,
    weight_of,
)


class ParallelSwiGLU(nn.Module):
    """silu(gate) * up, and down again, with the inner size cut over the ranks.

    Args:
        hidden_size: of input and output.
        intermediate_size: the full inner size; a multiple of the group's size.
        sequence_parallel: input and output are this rank's slice of the sequence.
        overlap: compute gradients of weights while dX is summed; "ring", with
            `sequence_parallel`: multiply one piece while another is sent.

    Shapes: [..., hidden_size] in and out.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        sequence_parallel: bool = False,
        overlap: Overlap = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        share("intermediate_size", intermediate_size, group)
        self.hidden_size, self.overlap, self.group = hidden_size, overlap, group
        shared: dict[str, Any] = {
            "bias": False,
            "sequence_parallel": sequence_parallel,
            "overlap": overlap,
            "device": device,
            "dtype": dtype,
            "group": group,
        }
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, **shared)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, **shared)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, **shared)

    @classmethod
    def from_full(
        cls, full: nn.Module, group: ProcessGroup | None = None, **options: Any
    ) -> Self:
        """Shards of a module with `gate_proj`, `up_proj` and `down_proj`."""
        gate = bare_weight(full, "gate_proj")
        inner, hidden = gate.shape
        block = cls(hidden, inner, **placed_as(gate), **options, group=group)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(block, name).load_full(bare_weight(full, name))
        return block

    def forward(self, x: Tensor) -> Tensor:
        check_features("ParallelSwiGLU", x, self.hidden_size)
        weights = [self.gate_proj.weight, self.up_proj.weight]
        gate, up = column_linear(
            x, weights, self.gate_proj.sequence_dim, self.overlap, self.group
        )
        return self.down_proj(gated(gate, up))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of which backward needs gate and up alone."""
    if type(gate) is type(up) is Tensor and gate.dtype == up.dtype:
        return _Gated.apply(gate, up)  # type: ignore[no-any-return]
    return silu_times(gate, up)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _Gated(torch.autograd.Function):
    """silu(gate) is computed again in backward: less is kept, and nothing is added."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            needed = ctx.needs_input_grad
            return gradients_by_autograd(silu_times, (gate, up), needed, grad)
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, F.silu(gate).mul_(grad)


class AllGatherMLP(nn.Module):
    """Up, an activation, and down again; each layer gathers its outputs.

    To be compared with `ColumnParallelLinear` and `RowParallelLinear`. Each rank
    computes the activation of all inner features and keeps them for backward.

    Args:
        hidden_size: of input and output; a multiple of the group's size.
        intermediate_size: the full inner size; a multiple of the group's size.

    Shapes: [..., hidden_size] in and out, on every rank.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = True,
        *,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        overlap: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.activation = activation
        shared: dict[str, Any] = {
            "bias": bias,
            "gather_output": True,
            "overlap": overlap,
            "device": device,
            "dtype": dtype,
            "group": group,
        }
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, **shared)
        self.down_proj = ColumnParallelLinear(intermediate_size, hidden_size, **shared)

    @classmethod
    def from_full(
        cls, full: nn.Module, group: ProcessGroup | None = None, **options: Any
    ) -> Self:
        """Shards of a module with `up_proj` and `down_proj`, with or without biases."""
        layers = [layer_of(full, name) for name in ("up_proj", "down_proj")]
        up, down = (weight_of(layer) for layer in layers)
        if up.shape != down.shape[::-1]:
            raise ValueError(
                f"up_proj {list(up.shape)} and down_proj {list(down.shape)}: the "
                "weights of an MLP have each other's shape transposed"
            )
        biases = [getattr(layer, "bias", None) for layer in layers]
        if (biases[0] is None) != (biases[1] is None):
            raise ValueError("one of up_proj and down_proj has a bias, the other none")
        inner, hidden = up.shape
        options |= placed_as(up) | {"bias": biases[0] is not None, "group": group}
        block = cls(hidden, inner, **options)
        block.up_proj.load_full(up, biases[0])
        block.down_proj.load_full(down, biases[1])
        return block

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))
