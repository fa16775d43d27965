"""The page on compute math: FLOPs of a token, MFU, days of a run, and check cases."""

from dataclasses import replace

from xtrain.plan import (
    Accelerator,
    ModelShape,
    attention_flops,
    model_flops,
    pipeline_idle,
    utilization,
)
from xtrain.plan.published import GPT_3
from xtrain.schedules import SCHEDULES, simulate

from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...values import percent, si, value
from .checked import LARGE, MODEL, SEQUENCE

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


# ----------------------------------------------------------------- time of a run


@value
def compute_step_seconds(gpus: int, achieved: float, batch: int, model: str) -> float:
    """Seconds of a step, if each device reaches so many model FLOP/s."""
    return model_flops(ModelShape.preset(model), SEQUENCE, batch) / (gpus * achieved)


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
