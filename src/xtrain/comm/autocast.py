"""`torch.autocast` for functions that are not in its lists."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype if it is on for their device, but float64 as it
    is. A function of ours that stands for torch's casts its inputs as torch's would.
    What is not a tensor stays as it is, for the check that comes next to refuse."""
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return tensors
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast casts to on this kind of device; None where it is off.

    Torch has none for meta: there it is the CPU's.
    """
    device = "cpu" if device == "meta" else device
    return (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    )


def without_autocast(device: str) -> AbstractContextManager:
    """A context in which autocast is off on this kind of device."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast("cpu" if device == "meta" else device, enabled=False)
