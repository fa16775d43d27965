"""Attention over a cut sequence: bytes sent, work by rank and step, what can be hidden.

    a rank sends, of [B, H, c, D] queries and [B, G, c, D] keys and values each

    ring        forward (N-1) K and V        backward (N-1) K and V, N dK and dV
    all_gather  forward (N-1) K and V        backward (N-1) K and V, (N-1) dK and dV
    ulysses     forward (N-1)/N Q, K, V, O   backward (N-1)/N of their gradients

Over runs of the sequence and with a window, a ring has `ring_steps` in place of N. dK
and dV of the first two travel in at least fp32. With fewer key heads than ranks
Ulysses repeats them first.

Causal work, in pairs of a query and a key it sees, by the owner of the keys:

    keys of             the rank itself    an earlier rank    a later rank
    none                c (c+1) / 2        c c                0
    striped             c (c+1) / 2        c (c+1) / 2        c (c-1) / 2
    zigzag              c (c+1) / 2        c c / 2            c c / 2

Sources: Liu et al., Ring Attention, 2023, section 3.2 (the condition for overlap);
Brandon et al., Striped Attention, 2023; Jacobs et al., DeepSpeed Ulysses, 2023.

Letters: B batch, H heads, G key heads, c tokens of a rank, D head dim, N ranks.
"""

import math

from xtrain.plan.checks import require_one_of, require_positive, require_whole
from xtrain.plan.traffic import FP32

WAYS = ("ring", "all_gather", "ulysses")


def context_bytes(
    way: str,
    tokens: int,
    heads: int,
    key_heads: int,
    head_dim: int,
    ranks: int,
    *,
    batch: int = 1,
    itemsize: int = 2,
    window: int | None = None,
) -> tuple[int, int]:
    """Bytes that a rank sends for one attention, forward and backward.

    Args:
        way: "ring", "all_gather" or "ulysses".
        tokens: of one rank.
        itemsize: bytes of an element of q, k, v and the output.
        window: of causal attention; shortens a ring over runs of the sequence.

    Raises:
        ValueError: an unknown way, or heads that cannot be cut so.
    """
    sizes = {"tokens": tokens, "heads": heads, "key_heads": key_heads,
             "head_dim": head_dim, "ranks": ranks, "batch": batch}  # fmt: skip
    for name, size in sizes.items():
        require_whole(name, size)
    require_one_of("way", way, WAYS)
    if heads % key_heads:
        raise ValueError(f"heads={heads} is not a multiple of key_heads={key_heads}")
    of_a_head = batch * tokens * head_dim
    if way == "ulysses":
        if heads % ranks:
            raise ValueError(f"heads={heads} is not divisible by {ranks} ranks")
        sent = 2 * heads + 2 * math.lcm(key_heads, ranks)
        each = (ranks - 1) * sent * of_a_head // ranks * itemsize
        return each, each
    keys = 2 * key_heads * of_a_head
    steps = ring_steps(tokens, ranks, window) if way == "ring" else ranks
    forward = (steps - 1) * keys * itemsize
    home = way == "ring" and steps > 1  # one more hop of dK and dV, to their owner
    return forward, forward + (steps - 1 + home) * keys * max(itemsize, FP32)


def ring_steps(tokens: int, ranks: int, window: int | None = None) -> int:
    """Ranks, itself included, whose keys a rank needs; hops are one fewer.

    Args:
        tokens: of one rank, which holds a run of the sequence.
        window: a token sees itself and the `window - 1` before it; None for all.
    """
    if window is None:
        return ranks
    return min(ranks, 1 + math.ceil((window - 1) / tokens))


def pairs_of_block(balance: str, query_rank: int, key_rank: int, tokens: int) -> int:
    """Pairs that a rank computes under a causal mask with the keys of one rank."""
    check_split(balance, tokens)
    if query_rank == key_rank:
        return tokens * (tokens + 1) // 2
    later = query_rank > key_rank
    if balance == "none":
        return tokens * tokens if later else 0
    if balance == "striped":
        return tokens * (tokens + 1 if later else tokens - 1) // 2
    return tokens * tokens // 2


def pairs_by_step(balance: str, ranks: int, tokens: int) -> list[list[int]]:
    """Pairs of each rank in each step of a ring: `[rank][step]`."""
    return [
        [
            pairs_of_block(balance, r, (r - step) % ranks, tokens)
            for step in range(ranks)
        ]
        for r in range(ranks)
    ]


def critical_pairs(balance: str, ranks: int, tokens: int) -> int:
    """The slowest rank's pairs, summed over the steps: in a ring all wait for it."""
    steps = zip(*pairs_by_step(balance, ranks, tokens), strict=True)
    return sum(map(max, steps))


def ideal_pairs(ranks: int, tokens: int) -> float:
    """Pairs of each rank if all S (S+1) / 2 were divided evenly."""
    sequence = ranks * tokens
    return sequence * (sequence + 1) / 2 / ranks


def check_split(balance: str, tokens: int) -> None:
    """ValueError unless a rank can hold that many tokens in this way."""
    require_whole("tokens", tokens)
    require_one_of("balance", balance, ("none", "striped", "zigzag"))
    if balance == "zigzag" and tokens % 2:
        raise ValueError(f"tokens={tokens} of a rank are not two halves for zigzag")


def hiding_tokens(
    flops: float,
    bandwidth: float,
    *,
    queries_per_key: int = 1,
    causal: bool = False,
    backward: bool = False,
    itemsize: int = 2,
    gradient_itemsize: int = FP32,
) -> float:
    """Tokens a rank must hold so that a ring's messages take no longer than its blocks.

    A block takes 4 c c D FLOPs a head forward and 10 backward, half of it under a
    balanced causal mask; during a block 2 c D elements a key head are sent, and in
    backward as many gradients. So c >= x flops / bandwidth, where x is 1 with
    as many key heads as heads, 2 bytes an element, forward, without a mask.

    Args:
        flops: FLOP/s at which a rank computes attention.
        bandwidth: bytes per second to the next rank, one way.
        queries_per_key: query heads that share a key head.
    """
    require_positive("flops", flops)
    require_positive("bandwidth", bandwidth)
    require_whole("queries_per_key", queries_per_key)
    per_pair = (10 if backward else 4) * queries_per_key / (2 if causal else 1)
    per_token = 2 * (itemsize + (gradient_itemsize if backward else 0))
    return per_token / per_pair * flops / bandwidth
