"""Products of many experts with rows sorted by expert, in one of three ways.

    rows      a a a b b d d d d      expert c got none
    loop      one product of each expert that has rows, on its run of rows
    padded    rows in a table [E, most rows of one, ...], one batched product over it
    grouped   torch's grouped product (16 and 32 bit): one call, no padding

The grouped product is one call without padding (on a CPU a loop in C++), and is taken
where torch has it. A loop costs calls, a table costs work on padding: the table suits
small even batches, and the loop takes the rest. Each way has the three products that a
linear layer y = x W^T needs: y itself, the gradient dy W of x, and the gradient dy^T x
of W.

Source: Gale et al., MegaBlocks, 2022.

Shapes: N rows, E experts, I inputs, O outputs of a linear layer, C rows of the table.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_MM: Any = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))
SMALL_PADDING = 2**20
"""Elements of the table of inputs up to which a batched product is chosen."""
CALL_WORK = 2**15
"""Multiplications that take as long as one more call; measured on a CPU."""
GROUPED_ON = {("cuda", torch.bfloat16), ("cpu", torch.float32)}
"""Devices and dtypes on which the grouped product is the fastest way."""
ALIGNED = 16
"""Bytes of which a row must be a multiple in torch's grouped product."""


class Rows(Protocol):
    """One of the three ways, for the rows of one batch."""

    def pack(self, x_NI: Tensor) -> Tensor:
        """Rows in the layout of the products."""

    def unpack(self, packed: Tensor) -> Tensor:
        """The rows again, [N, ...]."""

    def linear(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        """x W^T of each expert's rows."""

    def input_gradient(
        self, packed: Tensor, w_EOI: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        """dy W of each expert's rows; added to `onto`, in place, if there is one."""

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

    def linear(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        return self.input_gradient(packed, w_EOI.mT)

    def input_gradient(
        self, packed: Tensor, w_EOI: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        add = onto is not None
        out = packed.new_empty(len(packed), w_EOI.shape[2]) if onto is None else onto
        runs = packed.split(self.sizes), w_EOI.unbind(0), out.split(self.sizes)
        for size, dy, w_OI, dx in zip(self.sizes, *runs, strict=True):
            if size and add:
                torch.addmm(dx, dy, w_OI, out=dx)
            elif size:
                torch.mm(dy, w_OI, out=dx)
        return out

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        out = dy.new_empty(len(self.sizes), dy.shape[1], x.shape[1])
        runs = dy.t().split(self.sizes, 1), x.split(self.sizes), out.unbind(0)
        for size, dy_ON, x_NI, dw_OI in zip(self.sizes, *runs, strict=True):
            if size:
                torch.mm(dy_ON, x_NI, out=dw_OI)
            else:
                dw_OI.zero_()
        return out


class PaddedRows:
    """One batched product over a table with as many rows for each expert."""

    def __init__(self, counts_E: Tensor):
        self.experts, self.most = len(counts_E), int(counts_E.max())
        experts_E = torch.arange(self.experts, device=counts_E.device)
        padding_E = experts_E * self.most - (counts_E.cumsum(0) - counts_E)
        padding_N = padding_E.repeat_interleave(counts_E)
        self.place_N = torch.arange(len(padding_N), device=counts_E.device) + padding_N

    def pack(self, x_NI: Tensor) -> Tensor:
        table = x_NI.new_zeros(self.experts * self.most, x_NI.shape[1])
        table.index_copy_(0, self.place_N, x_NI)
        return table.view(self.experts, self.most, x_NI.shape[1])

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.flatten(0, 1).index_select(0, self.place_N)

    def linear(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        return torch.bmm(packed, w_EOI.mT)

    def input_gradient(
        self, packed: Tensor, w_EOI: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        if onto is None:
            return torch.bmm(packed, w_EOI)
        return onto.baddbmm_(packed, w_EOI)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(dy.mT, x)


class GroupedRows:
    """Torch's grouped product."""

    def __init__(self, counts_E: Tensor):
        self.ends_E = counts_E.cumsum(0).to(torch.int32)

    def pack(self, x_NI: Tensor) -> Tensor:
        return x_NI

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def linear(self, packed: Tensor, w_EOI: Tensor) -> Tensor:
        return GROUPED_MM(packed, w_EOI.mT, offs=self.ends_E)

    def input_gradient(
        self, packed: Tensor, w_EOI: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        dx = GROUPED_MM(packed, w_EOI, offs=self.ends_E)
        return dx if onto is None else onto.add_(dx)

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
    """The fastest way, as measured in the races of lecture 7."""
    kind = x_NI.device.type, x_NI.dtype
    if kind in GROUPED_ON and grouped_takes(x_NI, width):
        return "grouped"
    experts, hidden = len(counts_E), x_NI.shape[1]
    most = int(counts_E.max()) if experts else 0
    small = 0 < experts * most * max(hidden, width) <= SMALL_PADDING
    padding = experts * most - len(x_NI)
    even = padding <= 3 * len(x_NI) and padding * hidden * width <= experts * CALL_WORK
    return "padded" if small and even else "loop"


def grouped_takes(x_NI: Tensor, width: int) -> bool:
    """Whether torch's grouped product takes these rows, and experts of this width."""
    sizes = x_NI.shape[1], width
    aligned = all(size * x_NI.element_size() % ALIGNED == 0 for size in sizes)
    return GROUPED_MM is not None and aligned and len(x_NI) > 0
