"""Tensors inside what a module takes and returns: tuples, dictionaries, dataclasses."""

import dataclasses
from typing import Any

import torch
from torch import Tensor


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors anywhere in a structure, in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
