"""Seconds of a step of one layout, by what they are spent on.

    step  =  micro-batches x (forward + backward of the slowest rank)
             + bubble + messages between stages          of the pipeline
             + gradients and weights that compute does not hide
             + the optimizer's pass over its state
             + a fixed part, and stragglers

    of a micro-batch    `pass_seconds`: kernels by roofline (`kernels`), and every
                        collective that they wait for (`transfer`)

Sources: Narayanan et al., 2021; the alpha-beta model and closed forms of
`xtrain.plan.cost` and `xtrain.plan.bubble`.
"""

from dataclasses import replace
from math import log2
from typing import Any

from xtrain.plan.assumptions import Assumptions
from xtrain.plan.bubble import pipeline_delay, pipeline_idle
from xtrain.plan.checks import require_positive, require_whole
from xtrain.plan.device_memory import pipeline_positions, state_bytes
from xtrain.plan.hardware import Accelerator
from xtrain.plan.kernels import Kernels
from xtrain.plan.layout import PLACEMENTS, DeviceParameters, Layout, device_parameters
from xtrain.plan.memory import recipe_of
from xtrain.plan.pass_seconds import Pass, PassTimes
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_traffic import (
    data_transfers,
    message_size,
    partial_transfers,
    shared_transfers,
)
from xtrain.plan.transfer import SEND, Links, Transfer, dtypes_of


class StepSeconds:
    """Of many layouts of one model: what they share is computed once."""

    def __init__(
        self,
        shape: ModelShape,
        accelerator: Accelerator,
        sequence: int,
        assumptions: Assumptions = Assumptions(),
    ) -> None:
        require_whole("sequence", sequence)
        if assumptions.network is not None:
            require_positive("network", assumptions.network)
        self.shape, self.device, self.sequence = shape, accelerator, sequence
        self.assumptions = assumptions
        self.constants = assumptions.constants
        self.dtypes = dtypes_of(assumptions.dtypes)
        self.recipe = recipe_of(assumptions.recipe)
        self.attention = assumptions.attention
        if self.attention is None:
            unfused = assumptions.formula == "unfused"
            self.attention = "unfused" if unfused else "flash"
        kernels = Kernels(
            accelerator, self.constants, assumptions.precision, self.attention
        )
        self.links = Links(
            accelerator, assumptions.gpus_per_node, self.constants, assumptions.network
        )
        self.passes = PassTimes(
            shape, sequence, kernels, self.links, self.dtypes,
            assumptions.tensor_overlap,
        )  # fmt: skip
        self.terms: dict[tuple[Any, ...], Any] = {}

    def held(self, layout: Layout, rank: int) -> DeviceParameters:
        """What each device of a pipeline rank holds."""
        key = ("held", layout.tensor, layout.pipeline, layout.chunks, layout.expert,
               layout.expert_cut, layout.schedule, rank)  # fmt: skip
        if key not in self.terms:
            self.terms[key] = device_parameters(self.shape, layout, rank)
        found: DeviceParameters = self.terms[key]
        return found

    def seconds(self, layout: Layout, passes: list[Pass]) -> dict[str, float]:
        """Of a step, by what they are spent on; of every pipeline rank one pass."""
        one = max(passes, key=lambda each: each.seconds)
        mirror = PLACEMENTS.get(layout.schedule) == "mirror"
        count = layout.micro_batches / (2 if mirror else 1)
        idle = delay = 0.0
        if layout.pipeline > 1:
            idle = self.idle(layout, passes, one)
            delay = self.constants.messages * self.delay(layout)
            delay += self.shared_seconds(layout)
        waiting = one.tensor + one.context + one.expert
        parts = {
            "compute": count * (one.seconds - waiting),
            "tensor": count * one.tensor + self.partial_seconds(layout),
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
        forward, backward_input, backward_weight, *_ = others
        found = pipeline_idle(
            layout.schedule,
            layout.pipeline,
            forward,
            backward_input,
            backward_weight,
            micro_batches=layout.micro_batches,
            chunks=layout.chunks,
        )
        return max(found, 0.0)

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
        """What messages between stages add to a step.

        Tensor ranks that hold the same activations send a part each (Narayanan et al.,
        2021, section 4.1).
        """
        size = message_size(self.shape, layout, self.sequence, self.dtypes)
        if not layout.sequence_parallel:
            size //= layout.tensor
        message = Transfer("pipeline", "activations", SEND, size, layout.pipeline)
        return pipeline_delay(
            layout.schedule,
            layout.pipeline,
            layout.micro_batches,
            self.links.seconds(layout, message),
            layout.chunks,
        )

    def shared_seconds(self, layout: Layout) -> float:
        """Of gradients that two pipeline ranks sum at the end."""
        held = self.held(layout, 0)
        shared = shared_transfers(self.shape, layout, held, self.dtypes)
        return sum(self.links.seconds(layout, one) for one in shared)

    def partial_seconds(self, layout: Layout) -> float:
        """Of gradients of which tensor ranks have parts, at the end."""
        held = self.held(layout, 0)
        parts = partial_transfers(self.shape, layout, held, self.dtypes, 0)
        return sum(self.links.seconds(layout, one) for one in parts)

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
        """State read and written once, gradients read, weights written.

        With offload in the host's memory: gradients go there, weights come back.
        """
        near = replace(layout, offload=False) if layout.offload else layout
        held = state_bytes(self.held(layout, 0), near, self.recipe)
        weights, gradients, main, master, moments = held
        shards = layout.shard_ranks if 0 < layout.zero < 3 else 1
        weights /= shards
        whole_gradients = layout.zero < 2 or layout.reduce_at_end
        summed = (gradients + main) / (shards if whole_gradients else 1)
        touched = 2 * (master + moments) + weights + summed
        if not layout.offload:
            return touched / self.device.memory_bandwidth
        if self.device.server is None:
            raise ValueError(
                f"offload=True: the server of {self.device.name} is not known here; "
                f"give an accelerator with one, such as h100"
            )
        server = self.device.server
        return touched / server.memory + (weights + summed) / server.link
