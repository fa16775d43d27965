"""The accelerator that this process computes on, whichever it is."""

from typing import Any

import torch


def accelerator_in_use() -> tuple[str, Any]:
    """Its type and torch's module for it; ("cpu", None) where none has been used.

    Asking begins nothing: ranks can still be forked.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        # torch.mps is ready whenever there is a device
        if getattr(module, "is_initialized", torch.accelerator.is_available)():
            return accelerator.type, module
    return "cpu", None
