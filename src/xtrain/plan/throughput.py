"""FLOPs of a step, what share of the peak they reach, and how long a run takes.

    model FLOPs       6 N + 12 L a d s a token         what the model asks for
    hardware FLOPs    and what is computed once more   what the device does
    MFU, HFU          each over seconds x devices x peak

N counts the weights of matrix products: the head, not the embedding. 12 L a d s counts
all pairs of positions; a causal kernel computes half of them.

Sources: Chowdhery et al., PaLM, 2022, appendix B (MFU); Korthikanti et al., 2022,
appendix A; Narayanan et al., 2021, equation 4 (training time).
"""

from xtrain.plan.activations import RECOMPUTE
from xtrain.plan.checks import require_one_of, require_positive
from xtrain.plan.shapes import ModelShape

SECONDS_PER_DAY = 86400


def model_flops(
    shape: ModelShape, sequence: int, batch: int, causal: bool = False
) -> int:
    """FLOPs of forward and backward of `batch` sequences, nothing computed twice."""
    return shape.flops_per_token(sequence, causal) * sequence * batch


def hardware_flops(
    shape: ModelShape,
    sequence: int,
    batch: int,
    recompute: str = "none",
    *,
    causal: bool = False,
    attention_passes: int = 1,
) -> int:
    """`model_flops`, and what recomputation adds.

    Args:
        recompute: "selective" adds the forward of attention's scores and values, "full"
            that of all layers.
        attention_passes: how often "selective" counts it. Korthikanti et al. count 3
            (their s/6h becomes s/3h, the whole attention once more), although what is
            computed again is one forward pass.
    """
    require_one_of("recompute", recompute, RECOMPUTE)
    tokens = sequence * batch
    total = model_flops(shape, sequence, batch, causal)
    if recompute == "full":
        head = 6 * shape.vocab_size * shape.hidden_size * tokens
        total += (total - head) // 3
    if recompute == "selective":
        total += attention_passes * attention_flops(shape, sequence, causal) * tokens
    return total


def attention_flops(shape: ModelShape, sequence: int, causal: bool = False) -> int:
    """FLOPs a token of one forward pass of scores and values in all layers."""
    pairs = sequence + 1 if causal else 2 * sequence
    return shape.num_hidden_layers * shape.attention_width * pairs


def layer_forward_flops(
    shape: ModelShape, sequence: int, layer: int, causal: bool = True
) -> tuple[int, int]:
    """FLOPs a token of a layer's forward: all, and those of scores and values."""
    attention = attention_flops(shape, sequence, causal) // shape.num_hidden_layers
    return 2 * shape.matrices_met_in_layer(layer) + attention, attention


def utilization(flops: float, seconds: float, gpus: int, peak: float) -> float:
    """Share of all GPUs' peak: MFU of `model_flops`, HFU of `hardware_flops`."""
    for name, value in (("seconds", seconds), ("gpus", gpus), ("peak", peak)):
        require_positive(name, value)
    return flops / (seconds * gpus * peak)


def compute_bound_tokens(flops: float, bandwidth: float, itemsize: int = 2) -> float:
    """Tokens a device needs, so that gathered weights hide behind what computes.

    A weight of `itemsize` bytes travels while 2 FLOPs a token are done with it, so it
    is flops / bandwidth tokens for 16-bit weights, whatever the model. For stage 3 the
    bandwidth is a device's own; the same holds for gradients in the same dtype.
    """
    for name, value in (("flops", flops), ("bandwidth", bandwidth)):
        require_positive(name, value)
    return itemsize / 2 * flops / bandwidth


def compute_bound_ranks(
    inner: int, flops: float, bandwidth: float, axes: int = 1
) -> float:
    """Tensor ranks up to which a layer computes longer than it sends: axes f W / C.

    Args:
        inner: size of the MLP, f.
        bandwidth: bytes per second of one axis of links.
        axes: of links that send at the same time.
    """
    require_positive("inner", inner)
    return axes * inner / compute_bound_tokens(flops, bandwidth)


def compute_bound_mixed(inner: int, flops: float, bandwidth: float) -> float:
    """Tokens a device needs with stage 3 and tensor ranks together: 2 (C / W)^2 / f."""
    return 2 * compute_bound_tokens(flops, bandwidth) ** 2 / inner


def training_days(
    parameters: float,
    tokens: float,
    gpus: int,
    achieved: float,
    recompute: str = "full",
) -> float:
    """Days of a run: 8 T P / (n X) with full recomputation, 6 T P / (n X) without.

    X are the FLOP/s that one device achieves, recomputation included.
    """
    for name, value in (("parameters", parameters), ("tokens", tokens),
                        ("gpus", gpus), ("achieved", achieved)):  # fmt: skip
        require_positive(name, value)
    require_one_of("recompute", recompute, ("none", "full"))
    passes = 8 if recompute == "full" else 6
    return passes * tokens * parameters / (gpus * achieved) / SECONDS_PER_DAY
