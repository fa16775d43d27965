"""Products of many experts with rows sorted by expert, in one of three ways.

    rows      a a a b b d d d d      expert c got none
    loop      one product of each expert that has rows, on its run of rows
    padded    rows in a table [E, most rows of one, ...], one batched product over it
    grouped   torch's grouped product (16 and 32 bit): one call, no padding

A loop costs calls, a table costs work on padding: small batches want the table, large
ones the loop or the grouped product. Each way has the three products that a linear
layer y = x W^T needs: y itself, the gradient dy W of x, and the gradient dy^T x of W.

Source: Gale et al., MegaBlocks, 2022.

Shapes: N rows, E experts, I inputs, O outputs of a linear layer, C rows of the table.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_MM: Any = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))
SMALL_PADDING = 2**20
"""Elements of the table of inputs up to which a batched product is chosen."""


class Rows(Protocol):
    """One of the three ways, for the rows of one batch."""

    def pack(self, x_NI: Tensor) -> Tensor:
        """Rows, as the products want them."""

    def unpack(self, packed: Tensor) -> Tensor:
        """The rows again, [N, ...]."""

    def linear(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        """x W^T of each expert's rows."""

    def input_gradient(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        """dy W of each expert's rows."""

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy^T x of each expert, [E, O, I]; zeros for one without rows."""


class LoopRows:
    """One product an expert."""

    def __init__(self, counts_E: Tensor):
        self.sizes = counts_E.tolist()

    def pack(self, x_NI: Tensor) -> Tensor:
        return x_NI

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Each expert that has rows, and which."""
        first = 0
        for expert, size in enumerate(self.sizes):
            if size:
                yield expert, slice(first, first + size)
            first += size

    def linear(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        return self.input_gradient(packed, w_EOI.mT)

    def input_gradient(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        out = packed.new_empty(len(packed), w_EOI.shape[2])
        for expert, rows in self.runs():
            torch.mm(packed[rows], w_EOI[expert], out=out[rows])
        return out

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        out = dy.new_zeros(len(self.sizes), dy.shape[1], x.shape[1])
        for expert, rows in self.runs():
            torch.mm(dy[rows].t(), x[rows], out=out[expert])
        return out


class PaddedRows:
    """One batched product over a table with as many rows for each expert."""

    def __init__(self, counts_E: Tensor):
        self.experts, self.most = len(counts_E), int(counts_E.max())
        first_E = counts_E.cumsum(0) - counts_E
        expert_N = torch.arange(self.experts, device=counts_E.device)
        expert_N = expert_N.repeat_interleave(counts_E)
        row_N = torch.arange(len(expert_N), device=counts_E.device)
        self.place_N = expert_N * self.most + row_N - first_E[expert_N]

    def pack(self, x_NI: Tensor) -> Tensor:
        table = x_NI.new_zeros(self.experts * self.most, x_NI.shape[1])
        table[self.place_N] = x_NI
        return table.view(self.experts, self.most, x_NI.shape[1])

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.flatten(0, 1)[self.place_N]

    def linear(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        return torch.bmm(packed, w_EOI.mT)

    def input_gradient(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        return torch.bmm(packed, w_EOI)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(dy.mT, x)


class GroupedRows(LoopRows):
    """Torch's grouped product."""

    def __init__(self, counts_E: Tensor):
        self.ends_E = counts_E.cumsum(0).to(torch.int32)

    def linear(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        return GROUPED_MM(packed, w_EOI.mT, offs=self.ends_E)

    def input_gradient(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        return GROUPED_MM(packed, w_EOI, offs=self.ends_E)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return GROUPED_MM(dy.t(), x, offs=self.ends_E)


PATHS: dict[str, type[LoopRows] | type[PaddedRows] | type[GroupedRows]] = {
    "loop": LoopRows,
    "padded": PaddedRows,
    "grouped": GroupedRows,
}


def rows_of(counts_E: Tensor, x_NI: Tensor, width: int, path: str | None) -> Rows:
    """The way that `path` names, or the one that fits `x` and experts of this width."""
    if path is None:
        path = choose_path(counts_E, x_NI, width)
    if path not in PATHS:
        raise ValueError(f"path={path!r} is not one of {list(PATHS)}")
    return PATHS[path](counts_E)


def choose_path(counts_E: Tensor, x_NI: Tensor, width: int) -> str:
    """Which way is fastest: measured, see the races of lecture 7."""
    if x_NI.is_cuda and x_NI.dtype == torch.bfloat16 and GROUPED_MM is not None:
        aligned = x_NI.shape[1] % 8 == 0 and width % 8 == 0
        if aligned:
            return "grouped"
    most = int(counts_E.max()) if len(counts_E) else 0
    table = len(counts_E) * most * max(x_NI.shape[1], width)
    crowded = len(counts_E) * most <= 4 * max(1, len(x_NI))
    return "padded" if 0 < table <= SMALL_PADDING and crowded else "loop"
