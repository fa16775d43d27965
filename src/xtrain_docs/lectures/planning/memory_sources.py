"""Memory math: what layers keep for backward, and where sources count differently."""

from dataclasses import replace
from fractions import Fraction

from xtrain.plan import (
    Layout,
    ModelShape,
    activation_memory,
    layer_activations,
    memory_per_device,
    traffic_per_step,
)

from ...values import value
from .checked import gpt, playbook_shape
from .memory import DENSE, GIB, LARGE, SEQUENCE

# ---------------------------------------------------------------- who disagrees


@value
def gpt_formula_gib(name: str, positions: int = 1024) -> float:
    """GiB of fp32 weights, of a GPT with the sizes of another model."""
    shape = ModelShape.preset(name)
    sizes = shape.hidden_size, shape.num_attention_heads, shape.num_hidden_layers
    other = gpt(*sizes, shape.vocab_size)
    other = replace(other, max_position_embeddings=positions)
    return 4 * other.parameters / GIB


@value
def korthikanti_extra_share() -> float:
    """What the head and the last norm of the 22B model keep, over its layers."""
    shape = gpt(6144, 64, 48)
    layout = Layout(tensor=8, sequence_parallel=True, micro_batch=4)
    held = memory_per_device(shape, layout, 2048, formula="unfused", logit_bytes=4)
    layers = 48 * activation_memory(2048, 4, 6144, 64, 8, True)
    return (held.activations - layers + held.logits) / layers


@value
def layer_share(
    name: str, sequence: int, kind: str = "fused", recompute: str = "none",
    tensor: int = 1, sequence_parallel: bool = False,
) -> float:  # fmt: skip
    """Bytes that a layer keeps of a token, over its hidden size."""
    shape = ModelShape.preset(name)
    ways = {"tensor": tensor, "sequence_parallel": sequence_parallel,
            "recompute": recompute}  # fmt: skip
    if kind == "fused":
        kept = layer_activations(shape, sequence, **ways).total  # type: ignore[arg-type]
    else:
        sizes = shape.hidden_size, shape.num_attention_heads
        kept = activation_memory(sequence, 1, *sizes, *ways.values())  # type: ignore[arg-type]
    return kept / (sequence * shape.hidden_size)


@value
def full_recompute_gib(sequence_parallel: bool) -> float:
    """The first rank of TP8 PP2 keeps this of its layers' inputs."""
    layout = Layout(tensor=8, pipeline=2, sequence_parallel=sequence_parallel,
                    micro_batches=8, recompute="full")  # fmt: skip
    held = memory_per_device(ModelShape.preset(LARGE), layout, 4096)
    return held.activations / GIB


@value
def playbook_run_gib() -> float:
    """States and activations of the first rank of the Playbook's 80B model."""
    shape = playbook_shape(80, 8192, 28672)
    layout = Layout(tensor=8, pipeline=2, data=4, zero=1, sequence_parallel=True,
                    micro_batches=64)  # fmt: skip
    held = memory_per_device(shape, layout, 4096, recipe="fp32_accum20")
    return (held.states + held.activations) / GIB


@value
def step_passes(
    stage: int, ranks: int = 8, kept: bool = False, micro_batches: int = 1
) -> float:
    """What a rank sends in a step, as a number of all-gathers of the model.

    Args:
        kept: stage 3 keeps the weights after forward.
    """
    shape = ModelShape.preset(DENSE)
    layout = Layout(data=ranks, zero=stage, reshard_after_forward=not kept,
                    micro_batches=micro_batches)  # fmt: skip
    transfers = traffic_per_step(shape, layout, SEQUENCE, dtypes="zero16")
    whole = 2 * shape.parameters * Fraction(ranks - 1, ranks)
    return float(sum(transfer.sent for transfer in transfers) / whole)
