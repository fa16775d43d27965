"""The page on compute math: FLOPs of a token, MFU, days of a run, and check cases."""

from dataclasses import replace

from xtrain.plan import (
    Accelerator,
    ModelShape,
    attention_flops,
    bubble_over_ideal,
    hardware_flops,
    idle_fraction,
    model_flops,
    pipeline_idle,
    training_days,
    utilization,
)
from xtrain.plan.published import GPT_3
from xtrain.schedules import SCHEDULES, simulate

from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, percent, si, value
from .checked import H100, LARGE, MODEL, SEQUENCE

TOKENS_A_SECOND = 5762
"""Of a device: torchtitan, Llama 3.1 8B on 8 H100, sequences of 8192 tokens."""


# ------------------------------------------------------------- FLOPs of a token


@FIGURES
def attention_share() -> str:
    """How much of a token's FLOPs is attention, over the length of the sequence."""
    lines = {}
    for name, size in ((MODEL, "8B"), (LARGE, "405B")):
        shape = ModelShape.preset(name)
        for causal, words in ((False, "all pairs"), (True, "causal")):
            lines[f"{size}, {words}"] = [
                (2.0**power, attention_part(shape, 2**power, causal))
                for power in range(10, 21)
            ]
    return line_chart(
        lines,
        Axis("tokens of a sequence", "log2", lambda s: si(s / 1.024, "", 2)
             if s < 2**20 else "1 M", ticks=[2.0**i for i in (10, 13, 16, 20)]),
        Axis("attention's share of the FLOPs", "linear", percent, low=0.0, high=1.0),
        "Scores and values as a share of all FLOPs of Llama 3, by sequence length",
    )  # fmt: skip


def attention_part(shape: ModelShape, sequence: int, causal: bool) -> float:
    """Attention's FLOPs over all of a token."""
    part = 3 * attention_flops(shape, sequence, causal)
    return part / shape.flops_per_token(sequence, causal)


def conventions(shape: ModelShape, sequence: int) -> dict[str, float]:
    """FLOPs of a token, by who counts what."""
    full = shape.flops_per_token(sequence)
    attention = 3 * attention_flops(shape, sequence)
    once = hardware_flops(shape, sequence, 1, "selective") / sequence
    return {
        "6 N, all parameters": 6 * shape.parameters,
        "6 N, matrices only (embedding out, head in)": full - attention,
        "and all pairs of attention: **our default**": full,
        "and those that a causal mask leaves": shape.flops_per_token(sequence, True),
        "6 N of all parameters, and all pairs": 6 * shape.parameters + attention,
        "our default, scores computed once more": once,
        "our default, all layers computed once more": (
            hardware_flops(shape, sequence, 1, "full") / sequence
        ),
    }


COUNTED_BY = ("GPT-3, Llama 3 (totals)", "", "PaLM, torchtitan", "Megatron-LM today",
              "picotron, nanotron", "HFU, selective", "HFU, full")  # fmt: skip


@TABLES
def compute_conventions(model: str = MODEL, sequence: int = SEQUENCE) -> Table:
    """FLOPs of a token, and the utilization of one run, by convention."""
    shape = ModelShape.preset(model)
    found = conventions(shape, sequence)
    default = shape.flops_per_token(sequence)
    rows = [
        [name, who, si(flops), percent(flops / default - 1, 1),
         percent(utilization(TOKENS_A_SECOND * flops, 1.0, 1, H100), 1)]
        for (name, flops), who in zip(found.items(), COUNTED_BY, strict=True)
    ]  # fmt: skip
    header = ["what counts", "counted so by", "FLOPs a token", "to our default",
              "share of the peak"]  # fmt: skip
    return Table(header, rows, "llrrr")


# ----------------------------------------------------------------- time of a run


@TABLES
def compute_days() -> Table:
    """Days of published runs by 6 or 8 T P / (n X)."""
    llama = ModelShape.preset(LARGE).parameters
    cases = (
        ("GPT-3 on A100", 175e9, 300e9, 1024, 140e12, "full", "34"),
        ("GPT of a trillion on A100", 1008e9, 450e9, 3072, 163e12, "full", "84"),
        ("Llama 3 405B on H100", llama, 15.6e12, 16384, 400e12, "none", "–"),
    )
    rows = []
    for name, parameters, tokens, gpus, rate, recompute, printed in cases:
        days = training_days(parameters, tokens, gpus, rate, recompute)
        rows.append([name, si(parameters), si(tokens), number(gpus),
                     si(rate, "FLOP/s"), recompute, number(days), printed])  # fmt: skip
    header = ["run", "parameters", "tokens", "devices", "each reaches", "recomputed",
              "days", "printed"]  # fmt: skip
    return Table(header, rows, "lrrrrlrr")


@value
def compute_step_seconds(gpus: int, achieved: float, batch: int, model: str) -> float:
    """Seconds of a step, if each device reaches so many model FLOP/s."""
    return model_flops(ModelShape.preset(model), SEQUENCE, batch) / (gpus * achieved)


@TABLES
def compute_bubbles() -> Table:
    """One bubble in two ways, for a few pipelines."""
    rows = []
    for schedule, ranks, count, chunks in (
        ("gpipe", 4, 4, 1), ("one_f_one_b", 4, 16, 1), ("one_f_one_b", 8, 8, 1),
        ("one_f_one_b", 8, 32, 1), ("interleaved", 8, 32, 4), ("zb_h1", 8, 32, 1),
        ("one_f_one_b", 16, 64, 1),
    ):  # fmt: skip
        sizes = schedule, ranks, count, chunks
        over, part = bubble_over_ideal(*sizes), idle_fraction(*sizes)
        rows.append([f"`{schedule}`", str(ranks), str(count), str(chunks),
                     percent(over, 1), percent(part, 1)])  # fmt: skip
    header = ["schedule", "ranks", "micro-batches", "chunks", "idle over ideal",
              "idle over the step"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


@value
def compute_dualpipe(played: bool, *times: float) -> float:
    """Idle time of DualPipe on 8 ranks: the report's form, or what is played."""
    forward, whole, weight, overlapped = times
    each = forward, whole - weight, weight
    if not played:
        return pipeline_idle("dualpipe", 8, *each, overlapped=overlapped)
    return max(
        simulate(SCHEDULES["dualpipe"](8, 20), *each, overlapped=overlapped).idle
    )


@value
def compute_gpt3_in_palm() -> float:
    """GPT-3's 24.6 TF on a V100, with attention added as PaLM does."""
    more = 3 * attention_flops(GPT_3, 2048) / (6 * 175e9)
    return utilization(24.6e12 * (1 + more), 1.0, 1, Accelerator.preset("v100").flops)


@value
def compute_listed_llama_2() -> int:
    """Parameters by the sizes that a list of Meta's has for Llama 2 7B."""
    shape = ModelShape.preset("llama-2-7b")
    listed = replace(shape, vocab_size=128256, num_key_value_heads=8,
                     intermediate_size=14336)  # fmt: skip
    return listed.parameters


@value
def compute_active(embedding: bool) -> int:
    """DeepSeek-V3's active parameters, with the input embedding or without."""
    shape = ModelShape.preset("deepseek-v3")
    table = shape.vocab_size * shape.hidden_size
    return shape.active_parameters - (0 if embedding else table)


@value
def compute_prediction_module(projection: bool) -> int:
    """DeepSeek-V3's module of the second token, with what joins its two inputs."""
    shape = ModelShape.preset("deepseek-v3")
    h = shape.hidden_size
    layer = shape.parameters_of_layer(shape.num_hidden_layers - 1)
    return layer + (2 * h * h + 3 * h if projection else 0)


@value
def compute_attention_part(model: str, sequence: int) -> float:
    """Attention's share of a token's FLOPs, all pairs counted."""
    return attention_part(ModelShape.preset(model), sequence, False)
