"""What the tensors of a message look like, and a header that says so in numbers.

(Like([2, 8], bfloat16, needs_gradient), Like([2], int64))
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
"""What a header begins with if there is nothing to send, as its stage has failed."""


class Like(NamedTuple):
    """What a tensor in a message looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def __str__(self) -> str:
        grad = " with a gradient" if self.needs_gradient else ""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{grad}"


Likes = tuple[Like, ...]


def likes_of(tensors: tuple[Tensor, ...]) -> Likes:
    """What these tensors look like."""
    return tuple(Like(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def as_words(likes: Likes) -> str:
    """For an error."""
    return ", ".join(map(str, likes)) or "no tensors"


def write_header(likes: Likes | None) -> Tensor:
    """Shapes and dtypes as numbers; None for nothing."""
    numbers = [NOTHING] if likes is None else [len(likes)]
    for shape, dtype, needs_gradient in likes or ():
        numbers += [DTYPES.index(dtype), int(needs_gradient), len(shape), *shape]
    padded = torch.zeros(HEADER, dtype=torch.int64)
    padded[: len(numbers)] = torch.tensor(numbers)
    return padded


def read_header(header: Tensor) -> Likes | None:
    """What `write_header` was given."""
    count, *numbers = header.tolist()
    if count == NOTHING:
        return None
    likes = []
    for _ in range(count):
        dtype, needs_gradient, dims, *numbers = numbers
        likes.append(Like(tuple(numbers[:dims]), DTYPES[dtype], bool(needs_gradient)))
        numbers = numbers[dims:]
    return tuple(likes)


def check_sendable(tensors: tuple[Tensor, ...], device: torch.device) -> None:
    """ValueError unless a message can carry these, and a header can say what they are.

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
