"""`torch.autocast` for functions that are not in its lists."""

import torch
from torch import Tensor


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype if it is on for their device, but float64 as it
    is. A function of ours that stands for torch's casts its inputs as torch's would.
    What is not a tensor stays as it is, for the check that comes next to refuse."""
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return tensors
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
