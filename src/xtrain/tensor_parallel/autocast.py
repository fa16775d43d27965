"""The layers under `torch.autocast`: what they multiply is cast before.

Their matmuls are autograd functions of ours, which autocast does not know.

Gradients arrive at the weights in the weights' own dtype; what ranks send each other is
in 16 bits.
"""

import torch
from torch import Tensor


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype if it is on for their device, else as they are.

    Raises:
        ValueError: their dtypes differ afterwards, which torch would find out when the
            input has been sent already; or autocast to float16 while gradients are on.
            They need a GradScaler, and torch's would skip a step on those tensor ranks
            only whose own slices overflowed.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return of_one_dtype(tensors)
    dtype = torch.get_autocast_dtype(device)
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
