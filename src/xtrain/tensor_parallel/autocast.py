"""The layers under `torch.autocast`: inputs and weights are cast before the matmul.

Autocast does not see the matmuls, which are inside our autograd functions. Messages are
in 16 bits; gradients reach the weights in the weights' dtype.
"""

import torch
from torch import Tensor

from xtrain.comm.autocast import autocast_dtype


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype if it is on for their device, else as they are.

    Raises:
        ValueError: their dtypes differ afterwards; or autocast to float16 with
            gradients enabled, which need a GradScaler: torch's would skip a step only
            on the tensor ranks whose own slices overflowed.
    """
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return of_one_dtype(tensors)
    if dtype == torch.float16 and torch.is_grad_enabled():
        raise ValueError(
            "tensor-parallel layers under autocast to torch.float16 would need a "
            "GradScaler that asks all tensor ranks, and torch's does not; use "
            "torch.autocast(..., dtype=torch.bfloat16)"
        )
    cast = (t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
    return of_one_dtype(tuple(cast))


def of_one_dtype(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """These tensors; ValueError unless the input has the dtype of the weights."""
    x, *weights = tensors
    for weight in weights:
        if weight.dtype != x.dtype:
            raise ValueError(f"the input is {x.dtype} and the weight {weight.dtype}")
    return tensors
