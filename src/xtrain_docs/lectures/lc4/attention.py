"""The page on attention: who holds which heads, and Llama 3.1's rotary frequencies."""

import torch

from xtrain.model import XtrainConfig
from xtrain.model.parameters import placement_of
from xtrain.tensor_parallel.rope import RopeScaling, scale_frequencies

from ...figures import REGISTRY
from ...svg import cell, document, text
from ...values import value

WIDTH, LEFT, TOP, HIGH = 400, 62, 32, 32
HEADS, KEY_HEADS, RANKS = 8, 2, 4
WIDE, GAP = 220 / 3, 14
AT_KEYS = LEFT + 2 * WIDE + GAP
AT_WITH = AT_KEYS + WIDE + GAP
CONFIG = XtrainConfig(
    vocab_size=1, hidden_size=1, intermediate_size=1, num_hidden_layers=1,
    num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=2,
)  # fmt: skip


def held_heads(layer: str, heads: int) -> list[list[int]]:
    """The heads in each rank's slice of the weight."""
    places = [placement_of(f"{layer}.weight", CONFIG, r, RANKS) for r in range(RANKS)]
    sizes = [heads // place.count for place in places]
    return [
        list(range(place.index * size, (place.index + 1) * size))
        for place, size in zip(places, sizes, strict=True)
    ]


@REGISTRY
def gqa_heads() -> str:
    """Query and key heads of every rank, and who holds the same key head."""
    keys = held_heads("k_proj", KEY_HEADS)
    parts = [
        text(LEFT, 18, "query heads", "xt-label"),
        text(AT_KEYS, 18, "key", "xt-label"),
        text(AT_WITH, 18, "same key on", "xt-label"),
    ]
    words = []
    for rank, queries in enumerate(held_heads("q_proj", HEADS)):
        y, (key,) = TOP + HIGH * rank, keys[rank]
        parts.append(text(6, y + 16.5, f"rank {rank}", "xt-tick"))
        for place, head in enumerate(queries):
            x, shared = LEFT + place * WIDE, head * KEY_HEADS // HEADS
            parts += cell(x, y, WIDE - 4, 24, shared, f"q{head}")
        parts += cell(AT_KEYS, y, WIDE - 4, 24, key, f"k{key}")
        others = [str(r) for r in range(RANKS) if keys[r] == [key] and r != rank]
        parts.append(text(AT_WITH, y + 16.5, f"rank {', '.join(others)}", "xt-tick"))
        words.append(f"rank {rank}: queries {queries}, key heads {[key]}")
    high = TOP + HIGH * RANKS
    title = "Heads in each rank's weights"
    return document(WIDTH, high, parts, title, "; ".join(words))


@value
def rope_slowdown(turns: float) -> float:
    """How much slower Llama 3.1 turns a pair, by its turns in the original length."""
    scaling = RopeScaling()
    length = scaling.original_max_position_embeddings
    pair = torch.tensor([2 * torch.pi * turns / length], dtype=torch.float64)
    return float(pair / scale_frequencies(pair, scaling))
