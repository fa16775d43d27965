"""Shapes and dtypes of a message's tensors, and the header that carries them.

(TensorMeta([2, 8], bfloat16, needs_gradient), TensorMeta([2], int64))
-> 2 | dtype 3, 1, 2 dims, 2, 8 | dtype 4, 0, 1 dim, 2 | 0 0 0 ...
"""

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
    torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip
HEADER = 256
"""Numbers in a header: how many tensors, and of each dtype, gradient, dims, shape."""
NOTHING = -1
"""What a header begins with if its stage has failed, and sends nothing else."""


class TensorMeta(NamedTuple):
    """Shape and dtype of a tensor in a message, and whether a gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def __str__(self) -> str:
        grad = " with a gradient" if self.needs_gradient else ""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{grad}"


Metas = tuple[TensorMeta, ...]


def metas_of(tensors: tuple[Tensor, ...]) -> Metas:
    """Shapes and dtypes of these tensors."""
    return tuple(TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def as_words(metas: Metas) -> str:
    """For an error."""
    return ", ".join(map(str, metas)) or "no tensors"


def write_header(metas: Metas | None) -> Tensor:
    """Shapes and dtypes as numbers; None for nothing."""
    numbers = [NOTHING] if metas is None else [len(metas)]
    for shape, dtype, needs_gradient in metas or ():
        numbers += [DTYPES.index(dtype), int(needs_gradient), len(shape), *shape]
    padded = torch.zeros(HEADER, dtype=torch.int64)
    padded[: len(numbers)] = torch.tensor(numbers)
    return padded


def read_header(header: Tensor) -> Metas | None:
    """What `write_header` was given."""
    count, *numbers = header.tolist()
    if count == NOTHING:
        return None
    metas = []
    for _ in range(count):
        dtype, needs_gradient, dims, *numbers = numbers
        metas.append(
            TensorMeta(tuple(numbers[:dims]), DTYPES[dtype], bool(needs_gradient))
        )
        numbers = numbers[dims:]
    return tuple(metas)


def check_sendable(tensors: tuple[Tensor, ...], device: torch.device) -> None:
    """ValueError unless a message can carry these, and a header can describe them.

    Args:
        device: where the rank's messages live.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type != device.type:
            raise ValueError(
                f"returned a {tensor.layout} tensor on {tensor.device}: a message is a "
                f"dense tensor on {device.type}"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(f"returned {tensor.dtype}, which no message carries")
    numbers = 1 + sum(3 + tensor.dim() for tensor in tensors)
    if numbers > HEADER:
        raise ValueError(
            f"returned {len(tensors)} tensors, whose shapes are {numbers} numbers: a "
            f"header holds {HEADER}"
        )
