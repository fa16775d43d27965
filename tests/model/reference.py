"""The same decoder as plain float64 maths on a dict of weights, without library code.

Rotation multiplies by complex numbers, scores are an einsum over repeated key heads
with an explicit mask, norms and the softmax are written out.
"""

import cmath
import math

import torch
from torch import Tensor

from tests.expert_parallel.reference import Rules, dense_moe
from xtrain.model import XtrainConfig

WEIGHTS = dict[str, Tensor]
MLP = "mlp."


def frequencies(config: XtrainConfig) -> list[float]:
    """Of each pair; with Llama 3.1's scaling in three cases, by wavelength."""
    found = []
    for pair in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * pair / config.head_dim)
        if (scaling := config.rope_scaling) is not None:
            length = scaling.original_max_position_embeddings
            wavelength = 2 * math.pi / frequency
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            if wavelength > length / low:
                frequency /= scaling.factor
            elif wavelength >= length / high:
                smooth = (length / wavelength - low) / (high - low)
                frequency *= (1 - smooth) / scaling.factor + smooth
        found.append(frequency)
    return found


def rotate(x: Tensor, positions: Tensor, config: XtrainConfig) -> Tensor:
    """[B, S, heads, D], each pair a complex number turned by its position's angle."""
    half, speeds = config.head_dim // 2, frequencies(config)
    numbers = torch.complex(x[..., :half], x[..., half:])
    turned = [
        [[cmath.rect(1, position * speed) for speed in speeds] for position in row]
        for row in positions.tolist()
    ]
    numbers = numbers * torch.tensor(turned, dtype=torch.complex128).unsqueeze(2)
    return torch.cat([numbers.real, numbers.imag], dim=-1)


def norm(x: Tensor, weight: Tensor, config: XtrainConfig) -> Tensor:
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / torch.sqrt(mean_square + config.rms_norm_eps) * weight


def attend(
    x: Tensor,
    weights: WEIGHTS,
    positions: Tensor,
    config: XtrainConfig,
    seen: Tensor,
):
    """`seen` [B, S, S]: which keys a query sees."""
    batch, sequence, _ = x.shape
    heads, share = (
        config.num_attention_heads,
        config.num_attention_heads // config.num_key_value_heads,
    )
    q, k, v = (
        (
            torch.einsum("bsh,oh->bso", x, weights[f"{name}_proj.weight"])
            + weights.get(f"{name}_proj.bias", 0)
        ).reshape(batch, sequence, -1, config.head_dim)
        for name in "qkv"
    )
    if config.qk_norm:
        q = norm(q, weights["q_norm.weight"], config)
        k = norm(k, weights["k_norm.weight"], config)
    q, k = rotate(q, positions, config), rotate(k, positions, config)
    out = []
    for head in range(heads):
        keys, values = k[:, :, head // share], v[:, :, head // share]
        scores = torch.einsum("bsd,btd->bst", q[:, :, head], keys)
        scores = scores / math.sqrt(config.head_dim)
        shares = torch.where(seen, scores.exp(), 0.0)
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-300)
        out.append(torch.einsum("bst,btd->bsd", shares, values))
    return torch.einsum("bso,ho->bsh", torch.cat(out, -1), weights["o_proj.weight"])


def swiglu(x: Tensor, weights: WEIGHTS) -> Tensor:
    gate = torch.einsum("bsh,fh->bsf", x, weights["gate_proj.weight"])
    up = torch.einsum("bsh,fh->bsf", x, weights["up_proj.weight"])
    return torch.einsum(
        "bsf,hf->bsh", gate / (1 + torch.exp(-gate)) * up, weights["down_proj.weight"]
    )


def experts(x: Tensor, weights: WEIGHTS, config: XtrainConfig) -> Tensor:
    """One token after the other, through one chosen expert after the other."""
    rules = Rules(
        config.num_experts_per_tok,
        config.scoring_func,
        config.norm_topk_prob,
        config.routed_scaling_factor,
        config.n_group,
        config.topk_group,
    )
    stacked = [weights[f"experts.{name}_proj"] for name in ("gate", "up", "down")]
    router = weights["router.weight"]
    found = dense_moe(x.flatten(0, 1), router, *stacked, rules).output_TH.view_as(x)
    if config.n_shared_experts:
        found = found + swiglu(x, part(weights, "shared."))
    return found


def part(weights: WEIGHTS, prefix: str) -> WEIGHTS:
    """The weights of one module."""
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


def sight(config: XtrainConfig, layer: int, documents: Tensor) -> Tensor:
    """[B, S, S]: which keys a query of this layer sees, one pair after the other."""
    rows, length = documents.shape
    seen = torch.zeros(rows, length, length, dtype=torch.bool)
    windowed = config.sliding_window and layer >= config.max_window_layers
    for row, ids in enumerate(documents.tolist()):
        for i in range(length):
            first = max(0, i - config.sliding_window + 1) if windowed else 0
            for j in range(first, i + 1):
                seen[row, i, j] = ids[i] == ids[j] >= 0
    return seen


def logits_of(
    weights: WEIGHTS,
    config: XtrainConfig,
    tokens: Tensor,
    positions: Tensor | None,
    documents: Tensor | None = None,
) -> Tensor:
    if documents is None:
        documents = torch.zeros_like(tokens)
    if positions is None:
        positions = torch.arange(tokens.shape[1])
    positions = positions.expand(tokens.shape)
    x = weights["embed_tokens.weight"][tokens]
    for number in range(config.num_hidden_layers):
        layer = part(weights, f"layers.{number}.")
        h = norm(x, layer["input_layernorm.weight"], config)
        seen = sight(config, number, documents)
        x = x + attend(h, part(layer, "self_attn."), positions, config, seen)
        h = norm(x, layer["post_attention_layernorm.weight"], config)
        half = experts if f"{MLP}router.weight" in layer else swiglu
        x = x + half(h, part(layer, MLP), *[config] * (half is experts))
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return torch.einsum("bsh,vh->bsv", norm(x, weights["norm.weight"], config), head)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """One token after the other; the sum is divided once, by how many count."""
    losses = [
        torch.log(torch.exp(row).sum()) - row[label]
        for row, label in zip(
            logits.flatten(0, 1), labels.flatten().tolist(), strict=True
        )
        if label != -100
    ]
    return sum(losses, torch.zeros((), dtype=torch.float64)) / max(1, len(losses))
