"""Seconds, memory and utilization of a step of one layout.

    step  =  micro-batches x (forward + backward of the slowest rank)
             + bubble + messages between stages          of the pipeline
             + gradients and weights that compute does not hide
             + the optimizer's pass over its state
             + a fixed part, and stragglers

    of a micro-batch    `pass_seconds`: kernels by roofline (`kernels`), and every
                        collective that they wait for (`transfer`)
    constants           `time_constants`: fitted on published runs, or your own

An estimate carries its range: what the same constants missed by on published runs that
they were not fitted on.

Sources: Narayanan et al., 2021; the alpha-beta model and closed forms of
`xtrain.plan.cost` and `xtrain.plan.bubble`.
"""

from math import log2
from typing import Any, NamedTuple

from xtrain.plan.bubble import pipeline_delay, pipeline_idle
from xtrain.plan.checks import require_one_of, require_positive, require_whole
from xtrain.plan.device_memory import (
    FORMULAS,
    DeviceMemory,
    layer_bytes,
    memory_per_device,
    pipeline_positions,
    state_bytes,
    verdict,
)
from xtrain.plan.hardware import Accelerator
from xtrain.plan.kernels import Kernels
from xtrain.plan.layout import PLACEMENTS, DeviceParameters, Layout, device_parameters
from xtrain.plan.layout_rules import check_layout
from xtrain.plan.memory import recipe_of
from xtrain.plan.pass_seconds import Pass, PassTimes, cut_of
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_traffic import data_transfers, message_size
from xtrain.plan.throughput import hardware_flops, model_flops
from xtrain.plan.time_constants import FITTED, RANGES, TimeConstants
from xtrain.plan.transfer import SEND, Links, Transfer, dtypes_of

GIB = 2**30


class Assumptions(NamedTuple):
    """Assumptions of an estimate. Each can be measured on a machine."""

    gpus_per_node: int | None = None
    """Devices that the link of a node joins; as the accelerator has it unless given."""
    precision: str = "bf16"
    """Of the layers' products: "bf16", "fp16", "fp8" or "fp4"."""
    attention: str | None = None
    """Of time: "flash" or "unfused"; as `formula` has it unless given."""
    network: float | None = None
    """Bytes a second of one device's adapter; the accelerator's unless given."""
    constants: TimeConstants = FITTED
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
        if isinstance(accelerator, str):
            accelerator = Accelerator.preset(accelerator)
        self.shape, self.device, self.sequence = shape, accelerator, sequence
        self.assumptions = assumptions
        self.constants = assumptions.constants
        self.capacity = accelerator.memory
        if assumptions.capacity is not None:
            require_positive("capacity", assumptions.capacity)
            self.capacity = assumptions.capacity
        if not 0 <= assumptions.reserve < self.capacity:
            raise ValueError(
                f"reserve={assumptions.reserve / GIB:g} GiB is not from 0 to below the "
                f"device's {self.capacity / GIB:g} GiB"
            )
        if assumptions.network is not None:
            require_positive("network", assumptions.network)
        self.dtypes = dtypes_of(assumptions.dtypes)
        self.recipe = recipe_of(assumptions.recipe)
        require_one_of("formula", assumptions.formula, FORMULAS)
        attention = assumptions.attention
        if attention is None:
            attention = "unfused" if assumptions.formula == "unfused" else "flash"
        kernels = Kernels(accelerator, self.constants, assumptions.precision, attention)
        self.links = Links(
            accelerator, assumptions.gpus_per_node, self.constants, assumptions.network
        )
        self.passes = PassTimes(shape, sequence, kernels, self.links, self.dtypes)
        self.terms: dict[tuple[Any, ...], Any] = {}
        self.flops = {
            mode: hardware_flops(shape, sequence, 1, mode)
            for mode in ("none", "selective", "full")
        }
        self.model_flops = model_flops(shape, sequence, 1)
        self.causal_flops = model_flops(shape, sequence, 1, causal=True)
        self.range = RANGES["experts" if shape.num_local_experts else "dense"]

    def estimate(self, layout: Layout) -> Estimate:
        """Of a layout that breaks no rule."""
        memory, position = self.fullest(layout)
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
            sequences * self.flops[layout.recompute] / available,
            sequences * self.causal_flops / available,
            (self.range[0] * tokens, self.range[1] * tokens),
        )

    # -------------------------------------------------------------- memory

    def held(self, layout: Layout, rank: int) -> DeviceParameters:
        key = ("held", layout.tensor, layout.pipeline, layout.chunks, layout.expert,
               layout.expert_cut, layout.schedule, rank)  # fmt: skip
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

    def seconds(self, layout: Layout, passes: list[Pass]) -> dict[str, float]:
        """Of a step, by what they are spent on; of every pipeline rank one pass."""
        one = max(passes, key=lambda each: each.seconds)
        mirror = PLACEMENTS.get(layout.schedule) == "mirror"
        count = layout.micro_batches / (2 if mirror else 1)
        idle = delay = 0.0
        if layout.pipeline > 1:
            idle = self.idle(layout, passes, one)
            delay = self.constants.messages * self.delay(layout)
        waiting = one.tensor + one.context + one.expert
        parts = {
            "compute": count * (one.seconds - waiting),
            "tensor": count * one.tensor,
            "context": count * one.context,
            "expert": count * one.expert,
            "bubble": idle,
            "pipeline": delay,
            "data": self.data_seconds(layout, one),
            "optimizer": self.optimizer_seconds(layout),
            "step": self.constants.step * log2(layout.gpus),
        }
        grown = self.constants.stragglers * log2(layout.gpus)
        parts["stragglers"] = grown * sum(parts.values())
        return parts

    def idle(self, layout: Layout, passes: list[Pass], one: Pass) -> float:
        """The slowest rank waits once for a stage of every other rank."""
        stages = 2 if PLACEMENTS.get(layout.schedule) == "mirror" else layout.chunks
        others = [
            (sum(times) - slowest) / (len(passes) - 1) / stages
            for times, slowest in zip(zip(*passes, strict=True), one, strict=True)
        ]
        return max(pipeline_idle(layout.schedule, layout.pipeline, *others[:3]), 0.0)

    def rank_passes(self, layout: Layout) -> list[Pass]:
        """Seconds of one micro-batch on each pipeline rank; middle ones are alike."""
        found = {}
        for where, rank in pipeline_positions(layout).items():
            found[where] = self.rank_pass(layout, rank)
        middle = found.pop("middle", None)
        inner = [middle] * (layout.pipeline - 2) if middle else []
        return [*found.values(), *inner]

    def rank_pass(self, layout: Layout, rank: int) -> Pass:
        """Seconds of one micro-batch on a pipeline rank."""
        return self.passes.of_rank(layout, rank, self.held(layout, rank))

    def delay(self, layout: Layout) -> float:
        """What messages between stages add to a step."""
        size = message_size(self.shape, layout, self.sequence, self.dtypes)
        message = Transfer("pipeline", "activations", SEND, size, layout.pipeline)
        return pipeline_delay(
            layout.schedule,
            layout.pipeline,
            layout.micro_batches,
            self.links.seconds(layout, message),
            layout.chunks,
        )

    def data_seconds(self, layout: Layout, one: Pass) -> float:
        """Time of gradients and weights that compute does not hide.

        Each time a collective runs, one micro-batch's forward or backward hides it,
        and is slowed down by it; a layer's share of the first has nothing to hide it.
        """
        held = self.held(layout, 0)
        layers = held.dense_layers + held.moe_layers
        waiting: dict[tuple[int, bool], float] = {}
        for transfer in data_transfers(held, layout, self.dtypes):
            key = transfer.times, transfer.backward
            seconds = self.links.seconds(layout, transfer, calls=layers + 1)
            waiting[key] = waiting.get(key, 0.0) + seconds
        if not self.assumptions.overlap:
            return sum(waiting.values())
        total = 0.0
        for (times, backward), seconds in waiting.items():
            window = one.seconds - one.forward if backward else one.forward
            window *= times * self.hidden_share(layout.zero, backward)
            hidden = min(window, seconds * layers / (layers + 1))
            total += seconds - hidden + self.constants.interference * hidden
        return total

    def hidden_share(self, stage: int, backward: bool) -> float:
        """Of the compute beside a collective of data ranks."""
        if stage == 3:  # prefetch
            return 1.0
        if not stage:
            return self.constants.buckets_hidden
        last, gather = self.constants.last_hidden, self.constants.gather_hidden
        return last if backward else gather

    def optimizer_seconds(self, layout: Layout) -> float:
        """State read and written once, gradients read, weights written."""
        held = state_bytes(self.held(layout, 0), layout, self.recipe)
        weights, gradients, main, master, moments = held
        shards = layout.shard_ranks if 0 < layout.zero < 3 else 1
        touched = 2 * (master + moments)
        touched += weights / shards
        touched += (gradients + main) / (shards if layout.zero == 1 else 1)
        return touched / self.device.memory_bandwidth
