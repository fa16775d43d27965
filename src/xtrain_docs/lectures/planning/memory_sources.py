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

from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import digits, value
from .checked import gpt, playbook_shape
from .memory import DENSE, GIB, LARGE, SEQUENCE

WAYS = (("1 rank", 1, False), ("8 tensor ranks", 8, False),
        ("and of the sequence", 8, True))  # fmt: skip


@TABLES
def activations_of_layers(sequence: int = SEQUENCE) -> Table:
    """Bytes that a layer keeps of a token, over its hidden size."""
    rows = []
    for name in ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b"):
        shape = ModelShape.preset(name)
        for recompute in ("none", "full"):
            cells = [
                layer_activations(shape, sequence, tensor=tensor,
                                  sequence_parallel=cut, recompute=recompute).total
                / (sequence * shape.hidden_size)
                for _, tensor, cut in WAYS
            ]  # fmt: skip
            rows.append([f"`{name}`, fused", recompute, *map(_four, cells)])
    shape = ModelShape.preset(DENSE)
    for recompute in ("none", "selective", "full"):
        cells = [
            activation_memory(sequence, 1, shape.hidden_size, shape.num_attention_heads,
                              tensor, cut, recompute)
            / (sequence * shape.hidden_size)
            for _, tensor, cut in WAYS
        ]  # fmt: skip
        rows.append(["a GPT layer of its size, scores kept", recompute,
                     *map(_four, cells)])  # fmt: skip
    header = ["layer", "recompute", *(name for name, *_ in WAYS)]
    return Table(header, rows, "llrrr")


def _four(amount: float) -> str:
    return digits(amount, 4)


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
def layer_share(name: str, sequence: int, way: str = "fused") -> float:
    """Bytes that a layer keeps of a token, over its hidden size."""
    shape = ModelShape.preset(name)
    unit = sequence * shape.hidden_size
    if way == "fused":
        return layer_activations(shape, sequence).total / unit
    heads = shape.num_attention_heads
    return activation_memory(sequence, 1, shape.hidden_size, heads) / unit


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
