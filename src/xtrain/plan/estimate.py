"""Seconds, memory and utilization of a step of one layout.

    seconds       `step_seconds`, by what they are spent on
    memory        `device_memory`, of the fullest pipeline rank
    constants     `time_constants`: fitted on published runs, or your own

An estimate carries its range: what the same constants missed by on published runs that
they were not fitted on.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from xtrain.plan.assumptions import Assumptions
from xtrain.plan.checks import require_one_of, require_positive
from xtrain.plan.device_memory import (
    FORMULAS,
    DeviceMemory,
    activation_bytes,
    gathered_bytes,
    layer_bytes,
    pipeline_positions,
    state_bytes,
    verdict,
)
from xtrain.plan.hardware import Accelerator
from xtrain.plan.layout import Layout
from xtrain.plan.layout_rules import check_layout
from xtrain.plan.pass_seconds import cut_of
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_seconds import StepSeconds
from xtrain.plan.throughput import hardware_flops, model_flops
from xtrain.plan.time_constants import RANGES

GIB = 2**30


class Estimate(NamedTuple):
    """The estimate of a layout."""

    layout: Layout
    seconds: float
    """Of a step."""
    parts: dict[str, float]
    """Those seconds by what they are spent on."""
    memory: DeviceMemory
    """Of the fullest device."""
    position: str
    """Where in the pipeline that is: first, middle or last."""
    verdict: str
    tokens_per_second: float
    mfu: float
    """Of model FLOPs that count all pairs of positions, as most papers do."""
    hfu: float
    causal_mfu: float
    """Of those that count the pairs that the mask leaves."""
    range: tuple[float, float]
    """Tokens a second of eight in ten published runs that were estimated so."""


def estimate(
    shape: ModelShape,
    layout: Layout,
    accelerator: Accelerator | str,
    sequence: int,
    **assumptions: Any,
) -> Estimate:
    """Seconds, memory and utilization of a step.

    Args:
        accelerator: a device, or the name of a preset.
        assumptions: fields of `Assumptions`.

    Raises:
        ValueError: the layout breaks a rule, which is named.
    """
    estimator = Estimator(shape, accelerator, sequence, Assumptions(**assumptions))
    allowed = estimator.assumptions.sharded_pipeline
    check_layout(shape, layout, sequence, sharded_pipeline=allowed)
    return estimator.estimate(layout)


class Estimator(StepSeconds):
    """Estimates many layouts of one model: what they share is computed once."""

    def __init__(
        self,
        shape: ModelShape,
        accelerator: Accelerator | str,
        sequence: int,
        assumptions: Assumptions = Assumptions(),
    ) -> None:
        if isinstance(accelerator, str):
            accelerator = Accelerator.preset(accelerator)
        self.capacity = accelerator.memory
        if assumptions.capacity is not None:
            require_positive("capacity", assumptions.capacity)
            self.capacity = assumptions.capacity
        if not 0 <= assumptions.reserve < self.capacity:
            raise ValueError(
                f"reserve={assumptions.reserve / GIB:g} GiB is not from 0 to below the "
                f"device's {self.capacity / GIB:g} GiB"
            )
        require_one_of("formula", assumptions.formula, FORMULAS)
        super().__init__(shape, accelerator, sequence, assumptions)
        again = "selective" if self.attention == "unfused" else "none"
        self.flops = {
            mode: hardware_flops(shape, sequence, 1, counted)
            for mode, counted in (("none", "none"), ("selective", again),
                                  ("full", "full"))
        }  # fmt: skip
        self.model_flops = model_flops(shape, sequence, 1)
        self.causal_flops = model_flops(shape, sequence, 1, causal=True)
        self.range = RANGES["experts" if shape.num_local_experts else "dense"]

    def estimate(
        self, layout: Layout, fullest: tuple[DeviceMemory, str] | None = None
    ) -> Estimate:
        """Of a layout that breaks no rule; `fullest` of it, if already computed."""
        memory, position = fullest or self.fullest(layout)
        parts = self.seconds(layout, self.rank_passes(layout))
        seconds = sum(parts.values())
        sequences = layout.batch
        tokens = sequences * self.sequence / seconds
        available = seconds * layout.gpus * self.device.flops
        return Estimate(
            layout,
            seconds,
            parts,
            memory,
            position,
            verdict(memory.total, self.capacity, self.assumptions.reserve),
            tokens,
            sequences * self.model_flops / available,
            sequences * self.computed_flops(layout) / available,
            sequences * self.causal_flops / available,
            (self.range[0] * tokens, self.range[1] * tokens),
        )

    def computed_flops(self, layout: Layout) -> float:
        """Of one sequence, with those that are computed twice."""
        layers = self.shape.num_hidden_layers / layout.pipeline
        share = layout.recomputed_share(layers)
        others = self.flops["selective"] if share < 1 else 0.0
        return share * self.flops[layout.recompute] + (1 - share) * others

    # -------------------------------------------------------------- memory

    def fullest(self, layout: Layout) -> tuple[DeviceMemory, str]:
        """Memory of the rank that needs most, and where it stands."""
        return max(
            (
                (self.rank_memory(layout, rank), where)
                for where, rank in pipeline_positions(layout).items()
            ),
            key=lambda found: found[0].total,
        )

    def rank_memory(self, layout: Layout, rank: int) -> DeviceMemory:
        """`memory_per_device`, of parts that many layouts share."""
        cut, terms = cut_of(layout), self.terms
        place = (layout.pipeline, layout.chunks, layout.schedule, rank)
        kept = ("kept", *cut, *place, layout.recomputed_layers, layout.micro_batches)
        if kept not in terms:
            key = ("bytes", *cut)
            if key not in terms:
                formula = self.assumptions.formula
                terms[key] = layer_bytes(self.shape, layout, self.sequence, formula)
            terms[kept] = activation_bytes(
                self.shape, layout, self.sequence, self.held(layout, rank), rank,
                terms[key],
            )  # fmt: skip
        states = (layout.tensor, layout.expert, layout.expert_cut, *place, layout.zero,
                  layout.shard_ranks, layout.expert_shard_ranks, layout.offload,
                  layout.reduce_at_end)  # fmt: skip
        if states not in terms:
            held = self.held(layout, rank)
            terms[states] = (
                state_bytes(held, layout, self.recipe),
                gathered_bytes(held, layout, self.recipe),
            )
        parts, gathered = terms[states]
        return DeviceMemory(*parts, *terms[kept], *gathered)

    def room(self, layout: Layout) -> float:
        """Bytes that it leaves free of what may be used."""
        used = self.fullest(layout)[0].total
        return self.capacity - self.assumptions.reserve - used

    def fewest_recomputed(self, layout: Layout) -> Layout:
        """The same with no more layers recomputed than memory asks for."""
        least, most = 0, -(-self.shape.num_hidden_layers // layout.pipeline)
        found = layout
        while most - least > 1:
            middle = (least + most) // 2
            tried = replace(layout, recomputed_layers=middle)
            if self.room(tried) >= 0:
                most, found = middle, tried
            else:
                least = middle
        return found
