"""Tensors in pieces."""

from torch import Tensor

BLOCK_BYTES = 256 << 10  # reduced at a time: stays in a core's own cache


def pieces(flat: Tensor, nbytes: int) -> list[Tensor]:
    """Cut a tensor into pieces of at most `nbytes`; an empty one stays one piece."""
    return list(flat.split(max(1, nbytes // flat.element_size())))
