"""The page on memory math: bytes of a step by phase, and of a layer in units of h."""

from fractions import Fraction

from xtrain.plan import (
    DeviceMemory,
    Layout,
    ModelShape,
    activation_memory,
    layer_activations,
    memory_over_step,
    memory_per_device,
)

from ...amounts import GiB, number
from ...figures import REGISTRY as FIGURES
from ...svg import stacked
from ...values import value
from .common import SEQUENCE, playbook_shape, step_bytes

DENSE = "llama-3-8b"


@value
def step_phases(zero: int) -> dict[str, DeviceMemory]:
    """The example: eight data ranks, two micro-batches of one sequence."""
    layout = Layout(data=8, zero=zero, micro_batches=2, recompute="full")
    shape = ModelShape.preset(DENSE)
    return memory_over_step(shape, layout, SEQUENCE, recipe="zero16")


@FIGURES
def memory_phases() -> str:
    """A bar for each phase of a step with ZeRO-1, cut by what the bytes are."""
    phases = {
        phase: {kind.replace("_", " "): size for kind, size in memory.parts().items()}
        for phase, memory in step_phases(1).items()
    }
    kinds = [k for k in phases["at rest"] if any(p[k] for p in phases.values())]
    bars = {phase: [parts[k] for k in kinds] for phase, parts in phases.items()}
    title = "Memory of a step, ZeRO-1"
    return stacked(bars, kinds, title, lambda size, _: f"{number(size / GiB)} GiB")


@value
def layer_share(
    name: str, sequence: int, kind: str = "fused", recompute: str = "none",
    tensor: int = 1, sequence_parallel: bool = False,
) -> float:  # fmt: skip
    """Bytes that a layer keeps of a token, over its hidden size."""
    shape, h = ModelShape.preset(name), ModelShape.preset(name).hidden_size
    if kind == "fused":
        kept = layer_activations(
            shape, sequence, tensor=tensor, sequence_parallel=sequence_parallel,
            recompute=recompute,
        ).total  # fmt: skip
    else:
        kept = activation_memory(sequence, 1, h, shape.num_attention_heads, tensor,
                                 sequence_parallel, recompute)  # fmt: skip
    return kept / (sequence * h)


@value
def playbook_run_bytes() -> float:
    """States and activations of the first rank of the Playbook's 80B model."""
    layout = Layout(tensor=8, pipeline=2, data=4, zero=1, sequence_parallel=True,
                    micro_batches=64)  # fmt: skip
    shape = playbook_shape(80, 8192, 28672)
    held = memory_per_device(shape, layout, 4096, recipe="fp32_accum20")
    return held.states + held.activations


@value
def step_passes(
    stage: int, ranks: int = 8, kept: bool = False, micro_batches: int = 1
) -> float:
    """What a rank sends in a step, as a number of all-gathers of the model.

    Args:
        kept: stage 3 keeps the weights after forward.
    """
    layout = Layout(data=ranks, zero=stage, reshard_after_forward=not kept,
                    micro_batches=micro_batches)  # fmt: skip
    whole = 2 * ModelShape.preset(DENSE).parameters * Fraction(ranks - 1, ranks)
    return step_bytes(DENSE, "zero16", layout) / float(whole)
