"""Seconds, memory and utilization of a step of one layout.

    step  =  micro-batches x (forward + backward of the slowest rank)
             + bubble + messages between stages          of the pipeline
             + exposed time of gradients and weights
             + the optimizer's pass over its state

    of a micro-batch    `pass_seconds`: matrix products at a share of the peak that you
                        assume, and every collective that they wait for
    hidden              gradients behind the last backward; gathered weights behind
                        compute

A collective takes alpha + bytes / bandwidth on the link of its axis (`links`). It is an
estimate for ranking layouts: kernels, stragglers and congestion are left out.

Sources: Narayanan et al., 2021; the alpha-beta model and closed forms of
`xtrain.plan.cost` and `xtrain.plan.bubble`.
"""

from typing import Any, NamedTuple

from xtrain.plan.bubble import pipeline_delay, pipeline_idle
from xtrain.plan.checks import require_positive, require_share, require_whole
from xtrain.plan.device_memory import (
    DeviceMemory,
    layer_bytes,
    memory_per_device,
    pipeline_positions,
    state_bytes,
    verdict,
)
from xtrain.plan.hardware import Accelerator
from xtrain.plan.layout import PLACEMENTS, DeviceParameters, Layout, device_parameters
from xtrain.plan.layout_rules import check_layout
from xtrain.plan.memory import recipe_of
from xtrain.plan.pass_seconds import Pass, PassTimes, cut_of
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_traffic import data_transfers, message_size
from xtrain.plan.throughput import hardware_flops, model_flops
from xtrain.plan.transfer import Links, dtypes_of

GIB = 2**30


class Assumptions(NamedTuple):
    """Assumptions of an estimate. Each can be measured on a machine."""

    gpus_per_node: int = 8
    efficiency: float = 0.6
    """Of the peak, in matrix products and attention."""
    link_efficiency: float = 0.8
    """Of a link's bandwidth; all-reduces among 8 A100 reach 0.78, among 8 H100 0.82."""
    recipe: str = "megatron18"
    dtypes: str = "megatron-bf16"
    formula: str = "fused"
    capacity: float | None = None
    """Bytes of a device's memory; the vendor's figure unless given."""
    reserve: float = 4 * 2**30
    """Bytes that should stay free: CUDA context, NCCL's buffers, workspaces."""
    overlap: bool = True
    """Gradients and gathered weights are sent under compute."""
    sharded_pipeline: bool = False


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
    hfu: float


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


class Estimator:
    """Estimates many layouts of one model: what they share is computed once."""

    def __init__(
        self,
        shape: ModelShape,
        accelerator: Accelerator | str,
        sequence: int,
        assumptions: Assumptions = Assumptions(),
    ) -> None:
        require_whole("sequence", sequence)
        require_whole("gpus_per_node", assumptions.gpus_per_node)
        require_share("efficiency", assumptions.efficiency)
        require_share("link_efficiency", assumptions.link_efficiency)
        if isinstance(accelerator, str):
            accelerator = Accelerator.preset(accelerator)
        self.shape, self.device, self.sequence = shape, accelerator, sequence
        self.assumptions = assumptions
        self.rate = accelerator.flops * assumptions.efficiency
        self.capacity = accelerator.memory
        if assumptions.capacity is not None:
            require_positive("capacity", assumptions.capacity)
            self.capacity = assumptions.capacity
        if not 0 <= assumptions.reserve < self.capacity:
            raise ValueError(
                f"reserve={assumptions.reserve / GIB:g} GiB is not from 0 to below the "
                f"device's {self.capacity / GIB:g} GiB"
            )
        self.dtypes = dtypes_of(assumptions.dtypes)
        self.recipe = recipe_of(assumptions.recipe)
        self.links = Links(
            accelerator, assumptions.gpus_per_node, assumptions.link_efficiency
        )
        self.passes = PassTimes(
            shape, sequence, self.rate, self.links, self.dtypes, assumptions.formula
        )
        self.terms: dict[tuple[Any, ...], Any] = {}
        self.flops = {
            mode: hardware_flops(shape, sequence, 1, mode)
            for mode in ("none", "selective", "full")
        }
        self.model_flops = model_flops(shape, sequence, 1)

    def estimate(self, layout: Layout) -> Estimate:
        """Of a layout that breaks no rule."""
        memory, position = self.fullest(layout)
        slowest = max(
            (
                self.rank_pass(layout, rank)
                for rank in pipeline_positions(layout).values()
            ),
            key=lambda one: one.seconds,
        )
        parts = self.seconds(layout, slowest)
        seconds = sum(parts.values())
        sequences = layout.batch
        available = seconds * layout.gpus * self.device.flops
        return Estimate(
            layout,
            seconds,
            parts,
            memory,
            position,
            verdict(memory.total, self.capacity, self.assumptions.reserve),
            sequences * self.sequence / seconds,
            sequences * self.model_flops / available,
            sequences * self.flops[layout.recompute] / available,
        )

    # -------------------------------------------------------------- memory

    def held(self, layout: Layout, rank: int) -> DeviceParameters:
        key = ("held", layout.tensor, layout.pipeline, layout.chunks, layout.expert,
               layout.schedule, rank)  # fmt: skip
        if key not in self.terms:
            self.terms[key] = device_parameters(self.shape, layout, rank)
        found: DeviceParameters = self.terms[key]
        return found

    def fullest(self, layout: Layout) -> tuple[DeviceMemory, str]:
        """Memory of the rank that needs most, and where it stands."""
        key = ("bytes", *cut_of(layout))
        if key not in self.terms:
            formula = self.assumptions.formula
            self.terms[key] = layer_bytes(self.shape, layout, self.sequence, formula)
        layers = self.terms[key]
        return max(
            (
                (
                    memory_per_device(
                        self.shape,
                        layout,
                        self.sequence,
                        rank=rank,
                        recipe=self.recipe,
                        held=self.held(layout, rank),
                        layers=layers,
                    ),
                    where,
                )
                for where, rank in pipeline_positions(layout).items()
            ),
            key=lambda found: found[0].total,
        )

    # ---------------------------------------------------------------- time

    def seconds(self, layout: Layout, one: Pass) -> dict[str, float]:
        """Of a step, by what they are spent on; `one` is the slowest rank's."""
        mirror = PLACEMENTS.get(layout.schedule) == "mirror"
        count = layout.micro_batches / (2 if mirror else 1)
        stages = 2 if mirror else layout.chunks
        idle = delay = 0.0
        if layout.pipeline > 1:
            stage = [seconds / stages for seconds in one[:3]]
            idle = max(pipeline_idle(layout.schedule, layout.pipeline, *stage), 0.0)
            delay = self.delay(layout)
        waiting = one.tensor + one.context + one.expert
        return {
            "compute": count * (one.seconds - waiting),
            "tensor": count * one.tensor,
            "context": count * one.context,
            "expert": count * one.expert,
            "bubble": idle,
            "pipeline": delay,
            "data": self.data_seconds(layout, one),
            "optimizer": self.optimizer_seconds(layout),
        }

    def rank_pass(self, layout: Layout, rank: int) -> Pass:
        """Seconds of one micro-batch on a pipeline rank."""
        return self.passes.of_rank(layout, rank, self.held(layout, rank))

    def delay(self, layout: Layout) -> float:
        """What messages between stages add to a step."""
        stride = layout.gpus // layout.pipeline
        alpha, beta = self.links.between(stride, layout.pipeline, False)
        size = message_size(self.shape, layout, self.sequence, self.dtypes)
        return pipeline_delay(
            layout.schedule,
            layout.pipeline,
            layout.micro_batches,
            alpha + size * beta,
            layout.chunks,
        )

    def data_seconds(self, layout: Layout, one: Pass) -> float:
        """Time of gradients and weights that compute does not hide.

        Each time a collective runs, one micro-batch's forward or backward hides it.
        """
        waiting: dict[tuple[int, bool], float] = {}
        for transfer in data_transfers(self.held(layout, 0), layout, self.dtypes):
            key = transfer.times, transfer.backward
            seconds = self.links.seconds(layout, transfer)
            waiting[key] = waiting.get(key, 0.0) + seconds
        if not self.assumptions.overlap:
            return sum(waiting.values())
        total = 0.0
        for (times, backward), seconds in waiting.items():
            window = one.seconds - one.forward if backward else one.forward
            total += max(0.0, seconds - times * window)
        return total

    def optimizer_seconds(self, layout: Layout) -> float:
        """State read and written once, gradients read, weights written."""
        held = state_bytes(self.held(layout, 0), layout, self.recipe)
        weights, gradients, main, master, moments = held
        shards = layout.shard_ranks if 0 < layout.zero < 3 else 1
        touched = 2 * (master + moments)
        touched += weights / shards
        touched += (gradients + main) / (shards if layout.zero == 1 else 1)
        return touched / self.device.memory_bandwidth
