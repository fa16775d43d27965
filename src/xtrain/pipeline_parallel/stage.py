"""A virtual stage: one of the parts, by layers, into which a model is cut.

    input -> [stage 0] -> [stage 1] -> ... -> [stage count - 1] -> loss

What a stage returns is what the next one is called with: a tensor, or a tuple of them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import nn

from xtrain.pipeline_parallel.recompute import checkpoint
from xtrain.pipeline_parallel.torch_wrappers import torch_reduction


class GradientReduction(Protocol):
    """What sums gradients over data ranks: DDP, FSDP or ZeRO of xtrain, or yours."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add up gradients on each rank and send nothing."""
        ...

    def reduce_gradients(self) -> None:
        """Reduce what has been added up inside `no_sync`."""
        ...


@runtime_checkable
class PartialGradients(Protocol):
    """A module within a stage whose ranks hold parts of some gradients after backward.

    As tensor ranks do of norms, each of which has seen its slice of the sequence.
    """

    def sum_partial_gradients(self) -> None:
        """Sum them; the runner calls it once a step."""
        ...


class PipelineStage(nn.Module):
    """A module, and its place in the pipeline.

    Args:
        module: called with what the stage before returned, or with the micro-batch's
            inputs; returns a tensor or a tuple of tensors.
        index: which stage it is, from 0.
        count: how many virtual stages there are.
        shared: parameters that other stages hold too, as tied embeddings are, under a
            name common to all of them: their gradients are summed.
        reduction: what reduces this stage's gradients over the data ranks, if that is
            not the module itself: a `ZeroOptimizer`.
        recompute: keep the inputs of a micro-batch only, and run the whole module once
            more before its backward. To recompute layer by layer, which needs less
            memory, let the module `checkpoint` each, as `XtrainModel.stages` does.

    Wrap `module`, or set `reduction`, before a runner gets the stage:
    `stage.module = DistributedDataParallel(stage.module, ...)`.

    Raises:
        ValueError: there is no such stage, or a shared parameter is not the module's.
    """

    _reduction: GradientReduction | None

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        *,
        shared: Mapping[str, nn.Parameter] | None = None,
        reduction: GradientReduction | None = None,
        recompute: bool = False,
    ):
        super().__init__()
        if not 0 <= index < count:
            raise ValueError(
                f"stage {index} of {count}: stages are 0 to {count - 1}"
                if count > 0
                else f"stage {index} of {count}: there is at least one stage"
            )
        own = {id(parameter) for parameter in module.parameters()}
        for name, parameter in (shared or {}).items():
            if id(parameter) not in own:
                raise ValueError(f"stage {index} shares {name!r} but does not hold it")
        self.module, self.index, self.count = module, index, count
        self.shared, self.recompute = dict(shared or {}), recompute
        self.reduction = reduction

    @property
    def reduction(self) -> GradientReduction | None:
        """What sums this stage's gradients over the data ranks, if anything does."""
        if self._reduction is None and hasattr(self.module, "reduce_gradients"):
            return self.module  # type: ignore[return-value]
        return self._reduction or torch_reduction(self.module)

    @reduction.setter
    def reduction(self, reduction: GradientReduction | None) -> None:
        self.__dict__["_reduction"] = reduction

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "reduction":  # also a module is not part of this one
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, *inputs: Any) -> Any:
        """What the module returns."""
        if self.recompute:
            return checkpoint(self.module, *inputs)
        return self.module(*inputs)

    def extra_repr(self) -> str:
        """Its place, for `print`."""
        return f"stage {self.index} of {self.count}"
