"""The blocks of a model: what ZeRO 3 gathers together and frees together."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import message_device
from xtrain.zero.flat_param_group import Shards


class Block:
    """A module whose parameters are gathered together."""

    def __init__(self, module: nn.Module, shards: list[Shards]):
        self.module, self.shards = module, shards
        self.calls = 0  # forwards with gradients so far
        self.open: set[tuple[int, Shards]] = set()  # calls that backward is inside of
        self.trainable = [s for s in shards if s.trainable]

    def start_gather(self) -> None:
        for shards in self.shards:
            shards.start_gather()

    def finish_gather(self) -> None:
        for shards in self.shards:
            shards.finish_gather()

    def install(self) -> None:
        for shards in self.shards:
            shards.install(self.calls)

    def uninstall(self) -> None:
        for shards in self.shards:
            shards.uninstall()

    def enter_backward(self, call: int) -> None:
        self.open |= {(call, shards) for shards in self.trainable or self.shards}

    def leave_backward(self, call: int, shards: Shards) -> None:
        """Free what no call needs any more."""
        self.open.discard((call, shards))
        if not any(other is shards for _, other in self.open):
            shards.free()
        if not self.open:
            self.free()

    def free(self) -> None:
        for shards in self.shards:
            shards.free()


def find_blocks(
    root: nn.Module, blocks: Iterable[type[nn.Module] | str] | None
) -> list[nn.Module]:
    """The modules to be gathered one by one; see FullyShardedDataParallel."""
    if blocks is None:
        lists = [m for m in root.modules() if isinstance(m, nn.ModuleList)]
        return [child for entries in lists for child in entries]
    wanted = list(blocks)
    names = {entry for entry in wanted if isinstance(entry, str)}
    classes = tuple(entry for entry in wanted if not isinstance(entry, str))
    known = dict(root.named_modules())
    unknown = sorted(names - known.keys())
    if unknown:
        raise ValueError(
            f"blocks {unknown}: no such modules; there are {sorted(known)}"
        )
    return [
        module
        for name, module in known.items()
        if module is not root and (name in names or isinstance(module, classes))
    ]


def nearest_block(
    root: nn.Module, chosen: list[nn.Module]
) -> dict[nn.Module, nn.Module]:
    """For each module the innermost chosen one around it, or the root."""
    nearest: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, block: nn.Module) -> None:
        block = module if any(module is m for m in chosen) else block
        nearest[module] = block
        for child in module.children():
            visit(child, block)

    visit(root, root)
    return nearest


def materialise_buffers(module: nn.Module, group: ProcessGroup | None) -> None:
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
            owner._buffers[key] = torch.zeros_like(buffer, device=message_device(group))
