"""Mixture of experts: bytes of the all-to-alls, capacity, balance, memory, overlap.

    an all-to-all       T k h b (e-1)/e   sent by a rank when routing is uniform
    a layer             4 of them: dispatch and combine, forward and backward
    between nodes       M h b             at most, when a token may visit M nodes
    capacity            ceil(T k / E x factor) slots for each expert
    experts on a rank   3 h f E L / (e x tensor x pipeline) parameters

The backward of dispatch is a combine and the other way round, so both carry the same
rows forward and backward. Only the counts of rows travel in addition.

Sources: Lepikhin et al., GShard, 2020; Fedus et al., Switch Transformers, 2021
(capacity, balance loss); DeepSeek-V3 technical report, 2024 (limit of nodes, overlap,
layout); DeepEP's README (bytes of a copy, measured bandwidths).

Letters: T tokens of a rank, k experts of a token, E experts, h hidden size, f inner
size of an expert, b bytes of an element, e expert ranks, M nodes, L layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from xtrain.plan.checks import require_one_of, require_positive, require_whole

FP8_BLOCK = 128
FP8_SCALE = 4
DEEPEP_HEADER = 16


def expert_capacity(
    tokens: int, num_experts: int, top_k: int, capacity_factor: float
) -> int:
    """Slots of each expert: ceil(tokens top_k / num_experts x capacity_factor).

    With a factor of 1 all copies fit if they are spread evenly.
    """
    require_whole("tokens", tokens, least=0)
    check_chosen(top_k, num_experts)
    require_positive("capacity_factor", capacity_factor)
    # The factor as it is written: 1.1 x 100 are 110, where floats give 111.
    factor = Fraction(str(capacity_factor))
    return math.ceil(Fraction(tokens * top_k, num_experts) * factor)


def copy_bytes(hidden_size: int, dtype: str = "bf16") -> int:
    """Bytes of one token's copy: "fp8" as DeepEP counts it, "bf16" or "fp32" bare.

    fp8 adds a scale of 4 bytes per 128 elements, and a header of 16.
    """
    require_whole("hidden_size", hidden_size)
    if dtype == "fp8":
        scales = math.ceil(hidden_size / FP8_BLOCK)
        return hidden_size + scales * FP8_SCALE + DEEPEP_HEADER
    sizes = {"bf16": 2, "fp32": 4}
    require_one_of("dtype", dtype, ("fp8", *sizes))
    return hidden_size * sizes[dtype]


def all_to_all_bytes(
    tokens: int, top_k: int, hidden_size: int, ranks: int, *, itemsize: int = 2
) -> float:
    """Bytes that a rank sends in one dispatch (or combine) with uniform routing.

    Of `tokens x top_k` copies each destination gets as many; one of `ranks` is the
    rank itself, and what goes there is not sent.
    """
    for name, size in (("top_k", top_k), ("hidden_size", hidden_size),
                       ("ranks", ranks), ("itemsize", itemsize)):  # fmt: skip
        require_whole(name, size)
    require_whole("tokens", tokens, least=0)
    return tokens * top_k * hidden_size * itemsize * (ranks - 1) / ranks


def routed_bytes(
    copies: Sequence[Sequence[int]], hidden_size: int, *, itemsize: int = 2
) -> list[int]:
    """Bytes that each rank sends in a dispatch: `copies[source][destination]` rows.

    A combine carries the same rows back, so its bytes are those of the transposed
    table.
    """
    require_whole("hidden_size", hidden_size)
    require_whole("itemsize", itemsize)
    for row in copies:
        if len(row) != len(copies):
            raise ValueError(f"{len(copies)} rows, but one names {len(row)} ranks")
        for count in row:
            require_whole("copies", count, least=0)
    rows = [sum(row) - row[rank] for rank, row in enumerate(copies)]
    return [sent * hidden_size * itemsize for sent in rows]


def all_to_all_bandwidth(tokens: int, top_k: int, copy: float, seconds: float) -> float:
    """Bytes per second as DeepEP counts them: every copy, also those that stay."""
    require_whole("tokens", tokens)
    require_whole("top_k", top_k)
    require_positive("copy", copy)
    require_positive("seconds", seconds)
    return tokens * top_k * copy / seconds


def nodes_visited(num_experts: int, top_k: int, nodes: int) -> float:
    """Nodes that hold a token's experts, on average, when any may be chosen.

    A node is missed when all `top_k` different experts lie on the others.
    """
    check_chosen(top_k, num_experts)
    check_even_experts("nodes", nodes, num_experts)
    elsewhere = num_experts - num_experts // nodes
    missed = math.comb(elsewhere, top_k) / math.comb(num_experts, top_k)
    return nodes * (1 - missed)


def bytes_between_nodes(
    hidden_size: int, nodes: int, node_limit: int, *, itemsize: int = 2
) -> tuple[float, int]:
    """A token's bytes between nodes in one dispatch: expected, and at most.

    It crosses once for each node it visits and is handed on inside that node. With
    uniform choice of nodes its own is among `node_limit` of them in node_limit/nodes
    of the cases.
    """
    for name, size in (("hidden_size", hidden_size), ("nodes", nodes),
                       ("node_limit", node_limit), ("itemsize", itemsize)):  # fmt: skip
        require_whole(name, size)
    if node_limit > nodes:
        raise ValueError(f"node_limit={node_limit} is above nodes={nodes}")
    one = hidden_size * itemsize
    most = min(node_limit, nodes - 1) if nodes == node_limit else node_limit
    return node_limit * (nodes - 1) / nodes * one, most * one


def experts_for_free(
    inside: float, between: float, node_limit: int
) -> tuple[float, float]:
    """Experts a token may have, on one node and on all, before `inside` is the limit.

    A copy that crossed between nodes at `between` bytes per second is handed on inside
    the node at `inside`: inside/between experts take no longer than the crossing.
    """
    require_positive("inside", inside)
    require_positive("between", between)
    require_whole("node_limit", node_limit)
    return inside / between, node_limit * inside / between


def balance_loss(
    counts: Sequence[float],
    probabilities: Sequence[float],
    *,
    top_k: int = 1,
    per: str = "copy",
) -> float:
    """num_experts x sum of f_i P_i, before its coefficient.

    Args:
        counts: copies (or their fraction) of each expert; f is `counts` over their sum.
        probabilities: P, the mean router probability of each expert.
        top_k: copies of a token; matters for `per="token"` only.
        per: "copy" (Switch, Megatron, DeepSeek: uniform routing gives 1) or "token"
            (transformers' Mixtral: f sums to `top_k`, uniform routing gives `top_k`).
    """
    if len(counts) != len(probabilities) or not counts:
        raise ValueError(
            f"{len(counts)} counts and {len(probabilities)} probabilities: one each "
            f"for every expert"
        )
    check_chosen(top_k, len(counts))
    require_one_of("per", per, ("copy", "token"))
    total = sum(counts)
    require_positive("the sum of counts", total)
    pairs = zip(counts, probabilities, strict=True)
    loss = len(counts) * sum(count * p for count, p in pairs) / total
    return loss * top_k if per == "token" else loss


@dataclass(frozen=True)
class ExpertMemory:
    """Routed experts of one rank: elements, and how many ranks hold the same ones."""

    parameters: float
    replicas: int
    optimizer_parameters: float
    """Those whose optimizer state a rank holds, cut over the replicas."""


def expert_memory(
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    layers: int,
    *,
    world: int = 1,
    expert: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
) -> ExpertMemory:
    """Parameters of routed experts on one of `world` ranks.

    `expert` ranks share the experts of a layer, `tensor` ranks each expert, `pipeline`
    ranks the layers; the rest of the world are replicas ("expert_data").
    """
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size,
             "num_experts": num_experts, "layers": layers, "world": world,
             "expert": expert, "tensor": tensor, "pipeline": pipeline}  # fmt: skip
    for name, size in sizes.items():
        require_whole(name, size)
    check_even_experts("expert", expert, num_experts)
    parts = expert * tensor * pipeline
    if world % parts:
        raise ValueError(
            f"world={world} is not a multiple of expert x tensor x pipeline = {parts}"
        )
    all_of_them = 3 * hidden_size * intermediate_size * num_experts * layers
    own, replicas = all_of_them / parts, world // parts
    return ExpertMemory(own, replicas, own / replicas)


def expert_seconds(
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    ranks: int,
    *,
    flops: float,
    bandwidth: float,
    dispatch: int = 2,
    combine: int = 2,
) -> tuple[float, float]:
    """Seconds of a token in forward: its experts' products, and both all-to-alls.

    Args:
        flops: FLOP/s of a rank in its experts.
        bandwidth: bytes per second of a rank in an all-to-all, one way.
        dispatch: bytes of an element on the way to the experts; `combine`: back.
    """
    require_whole("intermediate_size", intermediate_size)
    require_positive("flops", flops)
    require_positive("bandwidth", bandwidth)
    compute = 6 * hidden_size * intermediate_size * top_k / flops
    sent = all_to_all_bytes(1, top_k, hidden_size, ranks, itemsize=dispatch)
    sent += all_to_all_bytes(1, top_k, hidden_size, ranks, itemsize=combine)
    return compute, sent / bandwidth


def hiding_width(
    flops: float, bandwidth: float, ranks: int, *, dispatch: int = 2, combine: int = 2
) -> float:
    """Inner size of an expert at which its products take as long as both all-to-alls.

    Neither the hidden size nor `top_k` matters: both cost once a copy. Wider experts
    hide the all-to-alls behind another micro-batch, narrower ones cannot.
    """
    compute, communication = expert_seconds(
        1, 1, 1, ranks, flops=flops, bandwidth=bandwidth,
        dispatch=dispatch, combine=combine,
    )  # fmt: skip
    return communication / compute


def overlap_speedup(compute: float, communication: float) -> float:
    """Time one after the other over time side by side: 2 at most, where both equal."""
    require_positive("compute", compute)
    if communication:
        require_positive("communication", communication)
    return (compute + communication) / max(compute, communication)


def check_chosen(top_k: int, num_experts: int) -> None:
    """ValueError unless a token can have `top_k` different experts."""
    require_whole("num_experts", num_experts)
    require_whole("top_k", top_k)
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} is above num_experts={num_experts}")


def check_even_experts(name: str, parts: int, num_experts: int) -> None:
    """ValueError unless `num_experts` can be cut evenly into `parts`."""
    require_whole("num_experts", num_experts)
    require_whole(name, parts)
    if num_experts % parts:
        raise ValueError(
            f"num_experts={num_experts} is not a multiple of {name}={parts}"
        )
