"""A mixture of experts in one process, written as the formulas read: loops over tokens
and experts in float64, no sorting, no batching. Autograd on it is the truth.

Letters: T tokens, H hidden, F inner, E experts, k chosen experts a token.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """How a router chooses; named as the arguments of `TopKRouter`."""

    top_k: int = 2
    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    capacity_factor: float | None = None


@dataclass
class Answer:
    """What the dense layer gives, token by token."""

    output_TH: Tensor
    probabilities_TE: Tensor
    logits_TE: Tensor
    chosen: list[list[int]]
    """Experts of each token, best first; none of a padded token."""
    gates: list[list[Tensor]]
    kept: list[list[bool]]
    load_balancing_loss: Tensor
    z_loss: Tensor
    counts: list[int] = field(default_factory=list)
    """Copies that each expert computes."""


def best(values: list[float], count: int) -> list[int]:
    """Places of the largest, largest first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def chosen_experts(selection: list[float], rules: Rules) -> list[int]:
    """Of the best groups, by the sum of the best top_k / top_groups in each, the best
    experts."""
    size = len(selection) // rules.groups
    allowed = list(range(len(selection)))
    if rules.top_groups < rules.groups:
        each = max(1, rules.top_k // rules.top_groups)
        sums = []
        for group in range(rules.groups):
            mine = sorted(selection[group * size : (group + 1) * size], reverse=True)
            sums.append(sum(mine[:each]))
        open_ = best(sums, rules.top_groups)
        allowed = [e for e in allowed if e // size in open_]
    order = best([selection[e] for e in allowed], rules.top_k)
    return [allowed[i] for i in order]


def capacity_of(tokens: int, experts: int, rules: Rules) -> int | None:
    if rules.capacity_factor is None:
        return None
    return math.ceil(tokens * rules.top_k / experts * rules.capacity_factor)


def within(chosen: list[list[int]], experts: int, capacity: int | None):
    """Which choices find room: all first choices before any second one."""
    kept = [[True] * len(mine) for mine in chosen]
    if capacity is None:
        return kept
    room = [capacity] * experts
    for choice in range(max(map(len, chosen), default=0)):
        for token, mine in enumerate(chosen):
            if choice < len(mine):
                kept[token][choice] = room[mine[choice]] > 0
                room[mine[choice]] -= 1
    return kept


def swiglu(x_H: Tensor, gate_FH: Tensor, up_FH: Tensor, down_HF: Tensor) -> Tensor:
    gate = gate_FH @ x_H
    return down_HF @ (gate * torch.sigmoid(gate) * (up_FH @ x_H))


def dense_moe(
    x_TH: Tensor,
    router_EH: Tensor,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    rules: Rules,
    *,
    bias_E: Tensor | None = None,
    mask_T: Tensor | None = None,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    kept: list[list[bool]] | None = None,
) -> Answer:
    """The layer on all tokens.

    Args:
        mask_T: True for real tokens.
        kept: which choices find room, where several ranks decide it.
    """
    tokens, experts = x_TH.shape[0], router_EH.shape[0]
    real = [mask_T is None or bool(mask_T[t]) for t in range(tokens)]
    logits = [router_EH @ x_TH[t] for t in range(tokens)]
    probabilities, chosen, gates = [], [], []
    for t in range(tokens):
        if rules.score == "softmax":
            scores = torch.exp(logits[t]) / torch.exp(logits[t]).sum()
        else:
            scores = 1 / (1 + torch.exp(-logits[t]))
        probabilities.append(scores / scores.sum())
        biased = scores if bias_E is None else scores + bias_E
        mine = chosen_experts(biased.tolist(), rules) if real[t] else []
        total = sum((scores[e] for e in mine), torch.zeros((), dtype=x_TH.dtype))
        weights = [scores[e] / total if rules.renormalize else scores[e] for e in mine]
        chosen.append(mine)
        gates.append([weight * rules.scale for weight in weights])
    if kept is None:
        kept = within(chosen, experts, capacity_of(sum(real), experts, rules))
    rows = []
    counts = [0] * experts
    for t in range(tokens):
        row = torch.zeros_like(x_TH[t])
        for e, weight, stays in zip(chosen[t], gates[t], kept[t], strict=True):
            if stays:
                row = row + weight * swiglu(
                    x_TH[t], gate_EFH[e], up_EFH[e], down_EHF[e]
                )
                counts[e] += 1
        if shared is not None:
            row = row + swiglu(x_TH[t], *shared)
        rows.append(row)
    empty = x_TH.new_zeros(0, experts)
    return Answer(
        torch.stack(rows) if rows else x_TH * 1,
        torch.stack(probabilities) if rows else empty,
        torch.stack(logits) if rows else empty,
        chosen,
        gates,
        kept,
        switch_loss(probabilities, chosen, real, experts, rules.top_k),
        z_loss(logits, real),
        counts,
    )


def switch_loss(probabilities, chosen, real, experts: int, top_k: int) -> Tensor:
    """E x the sum over experts of (share of choices) x (mean probability)."""
    count = sum(real)
    total = torch.zeros((), dtype=torch.float64)
    for e in range(experts):
        share = sum(mine.count(e) for mine in chosen) / (max(count, 1) * top_k)
        mean = sum(
            (p[e] for p, mine in zip(probabilities, real, strict=True) if mine),
            torch.zeros((), dtype=torch.float64),
        )
        total = total + experts * share * mean / max(count, 1)
    return total


def z_loss(logits, real) -> Tensor:
    """The mean over tokens of log(sum(exp(logits))) squared."""
    squares = [
        torch.log(torch.exp(row).sum()) ** 2
        for row, mine in zip(logits, real, strict=True)
        if mine
    ]
    total = sum(squares, torch.zeros((), dtype=torch.float64))
    return total / max(len(squares), 1)


def sequence_loss(probabilities_BSE: Tensor, experts_BSk: Tensor) -> Tensor:
    """DeepSeek's, per sequence, then the mean of the sequences."""
    batch, length, experts = probabilities_BSE.shape
    top_k = experts_BSk.shape[-1]
    total = torch.zeros((), dtype=torch.float64)
    for b in range(batch):
        for e in range(experts):
            count = sum(row.count(e) for row in experts_BSk[b].tolist())
            share = experts / (top_k * length) * count
            total = total + share * probabilities_BSE[b, :, e].sum() / length / batch
    return total


def weights(
    experts: int, hidden: int, inner: int, seed: int = 5, shared: int = 0
) -> dict[str, Tensor]:
    """Router and experts, and if asked for a shared one; all float64, all different."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return drawn(generator, *shape)

    made = {
        "router": randn(experts, hidden),
        "gate": randn(experts, inner, hidden) / hidden**0.5,
        "up": randn(experts, inner, hidden) / hidden**0.5,
        "down": randn(experts, hidden, inner) / inner**0.5,
    }
    if shared:
        made |= {
            "shared_gate": randn(shared, hidden) / hidden**0.5,
            "shared_up": randn(shared, hidden) / hidden**0.5,
            "shared_down": randn(hidden, shared) / shared**0.5,
        }
    return made


def tokens(count: int, hidden: int, seed: int = 0) -> Tensor:
    return drawn(torch.Generator().manual_seed(1000 + seed), count, hidden)


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    """The same numbers on any device: drawn on the CPU."""
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device())
