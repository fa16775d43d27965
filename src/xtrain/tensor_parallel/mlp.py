"""SwiGLU cut over the ranks of a group: one all-reduce forward, one backward.

    x replicated -> gate, up: columns -> silu(gate) * up on this rank's slice of the
    inner size -> down: rows, summed over ranks

Gate and up read the same x, so their gradients are added before one all-reduce of dX.

Sources: Shoeybi et al., Megatron-LM, 2019; Shazeer, GLU Variants Improve Transformer,
2020.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.tensor_parallel.functions import Overlap, column_linear
from xtrain.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from xtrain.tensor_parallel.shards import bare_weight, check_features, placed_as, share


class ParallelSwiGLU(nn.Module):
    """silu(gate) * up, and down again, with the inner size cut over the ranks.

    Args:
        hidden_size: of input and output.
        intermediate_size: the full inner size; a multiple of the group's size.
        sequence_parallel: input and output are this rank's slice of the sequence.
        overlap: compute gradients of weights while the sum of dX travels; "ring", with
            `sequence_parallel`: multiply one piece while another one travels.

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
        return self.down_proj(F.silu(gate) * up)
