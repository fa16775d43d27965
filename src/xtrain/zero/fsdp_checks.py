"""Checks of the arguments of FullyShardedDataParallel, before anything is sent."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import as_text, check_same, problem_of
from xtrain.comm.checks import message_device
from xtrain.comm.wrapper_mesh import Over
from xtrain.comm.wrapper_rules import check_options, check_unwrapped
from xtrain.zero.fsdp_wrap import find_blocks

Blocks = Sequence[type[nn.Module] | str] | None


def check_arguments(
    module: nn.Module,
    over: Over,
    compute_dtype: torch.dtype | None,
    blocks: Blocks,
    options: Mapping[str, object],
) -> None:
    """ValueError on every rank if one rank's model or arguments are wrong or differ.

    Buffers on the meta device get memory.
    """
    problem = problem_of(
        over.check,
        lambda: check_options(over.reduction),
        lambda: check_compute_dtype(compute_dtype),
        lambda: check_unwrapped(module, "FullyShardedDataParallel"),
        lambda: check_blocks(module, blocks),
        lambda: check_device(module, options["device"]),
        lambda: materialise_buffers(module, options["device"], over.group),
    )
    options = {
        **options,
        "compute_dtype": compute_dtype,
        "blocks": blocks and sorted(map(as_text, blocks)),
    }
    named = [*module.named_parameters(), *module.named_buffers()]
    check_same("parameters", named, over.group, options, problem)


def check_compute_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"compute_dtype={dtype} is not a floating-point dtype")


def check_blocks(module: nn.Module, blocks: Blocks) -> None:
    known = dict(module.named_modules())
    names = {block for block in blocks or () if isinstance(block, str)}
    if unknown := sorted(names - known.keys()):
        raise ValueError(
            f"blocks {unknown}: no such modules; there are {sorted(known)}"
        )
    find_blocks(module, blocks)  # raises for what is neither a name nor a class


def check_device(module: nn.Module, device: Any) -> None:
    held = next(module.parameters(), None)
    if device is not None and held is not None and not held.is_meta:
        raise ValueError(
            f"device={device} of a module on {held.device}: its shards stay there; "
            "device is for a module on the meta device"
        )


def materialise_buffers(
    module: nn.Module, device: Any, group: ProcessGroup | None
) -> None:
    """Give buffers on the meta device memory; ValueError if nothing would fill them."""
    kept = module.state_dict().keys()
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if name not in kept:
                raise ValueError(
                    f"buffer {name} is on the meta device and not part of the model's "
                    "state: no checkpoint would fill it"
                )
            place = device or message_device(group)
            owner._buffers[key] = torch.zeros_like(buffer, device=place)
