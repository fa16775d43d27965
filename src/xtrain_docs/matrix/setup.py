"""How a training run of the support matrix is set up: what features change."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

STEPS = 3


@dataclass
class Setup:
    """One training run: the same for all ranks, and for the process that they equal.

    Attributes:
        ranks: of the World; `subgroups` of them train side by side. Every `tensor` of
            them hold one model together, cut; `sequence_parallel` between its matrices.
        pipeline: so many ranks hold it in stages, and run them by `schedule`.
        length: of the sequences.
        dtype: of the weights; `low` that of the weights in computation, with `dtype`
            for the masters (None: no masters). `autocast` leaves the weights alone.
        tolerance: of each tensor's distance from the reference, over how far the
            reference has moved it.
        scaler: "GradScaler" is torch's, "LossScaler" ours; the first step overflows on
            one rank, so all ranks must skip it.
        micro_batches: of a step on each rank. `quiet`: all backwards but the last are
            in no_sync(); `by_hand`: all are, and reduce_gradients() follows;
            `interleaved`: a forward runs ahead of the backwards, F0 F1 B0 F2 B1 B2.
        uneven: rank 0 has a step more than the others, inside join().
        model: arguments of Toy; `leave_out`: odd ranks leave the gates out.
        meta: the model is built on the meta device.
        options: of the wrapper.
        inner: the wrapper that is around the module already.
    """

    wrapper: str = ""
    ranks: int = 2
    subgroups: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    schedule: str = ""
    length: int = 5
    dtype: torch.dtype = torch.float64
    low: torch.dtype | None = None
    autocast: torch.dtype | None = None
    tolerance: float = 1e-10
    scaler: str = ""
    micro_batches: int = 1
    quiet: bool = False
    by_hand: bool = False
    interleaved: bool = False
    uneven: bool = False
    max_norm: float | None = None
    model: dict[str, Any] = field(default_factory=dict)
    leave_out: bool = False
    meta: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    inner: str = ""
    optimizer_class: type[Optimizer] = torch.optim.SGD
    defaults: dict[str, Any] = field(
        default_factory=lambda: {"lr": 0.1, "momentum": 0.9}
    )

    @property
    def size(self) -> int:
        """How many ranks train together, each on batches of its own."""
        return self.ranks // self.subgroups // self.tensor // self.pipeline

    @property
    def averages(self) -> bool:
        return self.options.get("gradient_reduction", "average") == "average"

    def steps(self, rank: int) -> int:
        """How many steps a rank has batches for."""
        return STEPS - 1 if self.uneven and rank > 0 else STEPS

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> Optimizer:
        return self.optimizer_class(parameters, **self.defaults)  # type: ignore[arg-type]
