"""Linear layers cut over the ranks of a group: by outputs, or by inputs.

`nn.Linear` stores its weight as [out, in], so the "column" of the literature (which
writes y = x A) is dim 0 of it, and the "row" is dim 1.

    ColumnParallelLinear  weight [O / N, K]  x whole -> y split   backward sums dX
    RowParallelLinear     weight [O, K / N]  x split -> y summed  backward sends nothing

A column layer followed by a row layer needs one all-reduce forward and one backward,
whatever is computed element by element between them.

Source: Shoeybi et al., Megatron-LM, 2019.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import (
    all_gather_split,
    identity_all_reduce_wide,
    split_all_gather,
)
from xtrain.tensor_parallel.functions import Overlap, column_linear, row_linear
from xtrain.tensor_parallel.shards import (
    check_features,
    copy_shard,
    placed_as,
    shard,
    share,
    weight_of,
)

SEQUENCE_DIM = -2  # of [..., sequence, features]


class ShardedLinear(nn.Module):
    """What both layers share: a weight [O, K] of which a rank holds a slice of `dim`.

    Built directly it draws the full layer from torch's generator, as `nn.Linear` would,
    and keeps its slice, so all ranks need the same seed.
    """

    dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        sequence_parallel: bool,
        overlap: Overlap,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        group: ProcessGroup | None,
    ):
        super().__init__()
        check_overlap(overlap, sequence_parallel)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_dim = SEQUENCE_DIM if sequence_parallel else None
        self.overlap, self.group = overlap, group
        shape = [out_features, in_features]
        what = ("out_features", "in_features")[self.dim]
        shape[self.dim] = share(what, shape[self.dim], group)
        empty = torch.empty(shape, device=device, dtype=dtype)
        self.weight = nn.Parameter(empty)
        self.bias = nn.Parameter(empty.new_empty(shape[0])) if bias else None
        self.reset_parameters()

    @classmethod
    def from_full(
        cls, full: nn.Module | Tensor, group: ProcessGroup | None = None, **options: Any
    ) -> Self:
        """The layer whose shards are slices of `full`, a linear layer or its weight."""
        weight, bias = weight_of(full), getattr(full, "bias", None)
        out_features, in_features = weight.shape
        options |= placed_as(weight) | {"bias": bias is not None, "group": group}
        layer = cls(in_features, out_features, **options)
        layer.load_full(weight, bias)
        return layer

    @torch.no_grad()
    def load_full(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's slice of the full weight, and its part of the bias."""
        copy_shard(self.weight, weight, self.dim, self.group)
        if self.bias is not None and bias is not None:
            self.bias.copy_(shard(bias, 0, self.group) if self.dim == 0 else bias)

    def reset_parameters(self) -> None:
        """Draw the full layer as `nn.Linear` does, and keep this rank's part."""
        if not self.weight.is_meta:
            sizes = self.in_features, self.out_features, self.bias is not None
            full = nn.Linear(*sizes, **placed_as(self.weight))
            self.load_full(full.weight, full.bias)


class ColumnParallelLinear(ShardedLinear):
    """A linear layer of which each rank computes its share of the output features.

    Args:
        in_features: K, of the full layer.
        out_features: O, of the full layer; a multiple of the group's size.
        bias: split as the outputs are.
        gather_output: return all O features on every rank instead of this rank's O / N.
        sequence_parallel: x is this rank's slice of the sequence (dim -2): it is
            gathered first, and dX is reduce-scattered.
        overlap: compute the weight's gradient while dX is summed; "ring", with
            `sequence_parallel`: multiply one piece of x while the next one arrives.

    Shapes: x [..., K] to y [..., O / N], or [..., O] with `gather_output`.
    """

    dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        overlap: Overlap = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        shared = sequence_parallel, overlap, device, dtype, group
        super().__init__(in_features, out_features, bias, *shared)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        check_features("ColumnParallelLinear", x, self.in_features)
        (y,) = column_linear(
            x, [self.weight], self.sequence_dim, self.overlap, self.group
        )
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return all_gather_split(y, -1, self.group) if self.gather_output else y


class RowParallelLinear(ShardedLinear):
    """A linear layer of which each rank multiplies its share of the input features.

    Args:
        in_features: K, of the full layer; a multiple of the group's size.
        out_features: O, of the full layer.
        bias: whole on every rank, added once, after the sum.
        split_input: x has all K features on every rank, and the layer takes its slice
            (backward then gathers dX); otherwise x is that slice already.
        sequence_parallel: return this rank's slice of the sequence (dim -2) of the sum
            instead of the whole; the bias's gradient is then summed over ranks.
        overlap: "ring", with `sequence_parallel`: multiply one piece of the sequence
            while another one is summed.

    Shapes: x [..., K / N], or [..., K] with `split_input`, to y [..., O].
    """

    dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        split_input: bool = False,
        sequence_parallel: bool = False,
        overlap: Overlap = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        shared = sequence_parallel, overlap, device, dtype, group
        super().__init__(in_features, out_features, bias, *shared)
        self.split_input = split_input

    def forward(self, x: Tensor) -> Tensor:
        if self.split_input:
            check_features("RowParallelLinear", x, self.in_features)
            x = split_all_gather(x, -1, self.group)
        check_features("RowParallelLinear", x, self.weight.shape[1])
        y = row_linear(x, self.weight, self.sequence_dim, self.overlap, self.group)
        if self.bias is None:
            return y
        if self.sequence_dim is None:
            return y + self.bias.to(y.dtype)
        return y + identity_all_reduce_wide(self.bias, self.group).to(y.dtype)


def check_overlap(overlap: Overlap, sequence_parallel: bool) -> None:
    """ValueError unless it is a choice that the layer has."""
    if overlap not in (True, False, "ring"):
        raise ValueError(f"overlap={overlap!r} is not True, False or 'ring'")
    if overlap == "ring" and not sequence_parallel:
        raise ValueError(
            "overlap='ring' is for sequence_parallel=True: it splits the all-gather "
            "and the reduce-scatter, which only that has"
        )
