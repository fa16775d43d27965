"""The state of a fully sharded model: pieces, whole tensors, checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Size, Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.zero.fsdp_checkpoint import (
    full_state,
    load_full_state,
    load_full_units,
    load_units,
    save_units,
)
from xtrain.zero.fsdp_unit import FSDPUnit


class ShardedState(nn.Module):
    """Base of `FullyShardedDataParallel`: what it loads and saves."""

    module: nn.Module
    units: list[FSDPUnit]
    process_group: ProcessGroup | None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's pieces of the parameters, flat, and the buffers.

        Under the bare module's names, as `named_parameters`. Only the same rank of as
        many ranks can load it: `full_state_dict` gives whole tensors, `save_sharded`
        writes what any number of ranks can load.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` gave on this rank."""
        return self.module.load_state_dict(*args, **kwargs)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the bare module's `state_dict`, whole, on every rank."""
        return full_state(self.module, self.units)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces of whole tensors: the inverse of `full_state_dict`.

        Every rank calls it with the same. ValueError on every rank, and nothing has
        changed, unless names and shapes are those of the bare module.
        """
        shapes, group = self.full_shapes(), self.process_group
        load_full_state(state, shapes, self.module, self.units, group)

    def full_shapes(self) -> dict[str, Size]:
        """The whole shape of every parameter, by name: pieces are flat.

        Use it where an optimizer's groups depend on the number of dimensions.
        """
        groups = [group for unit in self.units for group in unit.flat_groups]
        return {
            name: slot.shape
            for group in groups
            for name, slot in zip(group.names, group.layout.slots, strict=True)
        }

    def save_sharded(
        self,
        directory: str | Path,
        step: int,
        optimizer: Optimizer | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint, every rank its pieces; see `xtrain.checkpoint`."""
        group = self.process_group
        return save_units(
            directory, step, self.module, self.units, optimizer, extra, group
        )

    def load_sharded(
        self, path: str | Path, optimizer: Optimizer | None = None
    ) -> tuple[int, dict[str, Any] | None]:
        """Read a checkpoint of any stage and world size, or a run's latest.

        Returns its step and extra. CheckpointError on every rank if it does not fit,
        CheckpointReplaced if it vanished meanwhile and another load may work.
        """
        group = self.process_group
        return load_units(path, self.module, self.units, optimizer, group)

    def load_full(self, path: str | Path) -> None:
        """Read a bare model's safetensors file, each rank only its own ranges.

        Names and shapes must fit. Floating-point weights are converted to the model's
        dtype, rounded to the nearest; any other difference of dtype is refused. Of tied
        weights that the file has under several names, the first by name is read.
        CheckpointError on every rank if the file is wrong on one; as far as names,
        shapes and dtypes tell, nothing has changed then.
        """
        load_full_units(path, self.module, self.units, self.process_group)
