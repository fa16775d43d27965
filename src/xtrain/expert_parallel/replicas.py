"""Experts by a placement: slots instead of experts, and gradients of replicas.

    placement             rank 0: experts 0 1      rank 1: experts 0 2
    slots                         0 1                      2 3
    copies for expert 0   1st, 3rd, ... -> slot 0  2nd, 4th, ... -> slot 2

Dispatch is the same with slots in place of experts: each sender deals the copies of an
expert to its replicas in turns. An expert's replicas have seen other tokens each, so
its gradient is the sum of theirs: each rank sends its gradient of an expert to all
others that hold it, and every holder adds them up in the order of ranks, to the same
bits.

Source: DeepSeek-AI, EPLB, 2025; DeepSeek-V3, 2024, section 3.4 (redundant experts).

Shapes: T tokens, k experts of a token, E experts, e ranks, s slots of a rank.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.expert_parallel.expert_placement import ExpertPlacement
from xtrain.expert_parallel.routing import Routing, numbers_within


def slots_of(routing: Routing, placement: ExpertPlacement) -> Routing:
    """The same routing with a slot for each expert, of e s slots."""
    experts, slots = routing.num_experts, placement.slots_per_rank
    device = routing.experts_Tk.device
    table = torch.tensor(slot_table(placement), device=device)
    replicas_E = (table >= 0).sum(1)
    chosen = routing.experts_Tk.masked_fill(~routing.kept_Tk, experts).flatten()
    number = numbers_within(chosen, experts + 1)  # among copies that are sent
    experts_M = routing.experts_Tk.flatten()
    slots_M = table[experts_M, number % replicas_E[experts_M]]
    total = len(placement.experts) * slots
    scores_TS = routing.logits_TE.detach().new_zeros(1, total)
    scores_TS = scores_TS.expand(len(routing.experts_Tk), -1)
    return replace(
        routing,
        experts_Tk=slots_M.view_as(routing.experts_Tk),
        logits_TE=scores_TS,
        probabilities_TE=scores_TS,
    )


def slot_table(placement: ExpertPlacement) -> list[list[int]]:
    """The slots of each expert's replicas by rank, -1 where it has fewer than others.

    Slot number = rank x slots of a rank + place among the rank's experts.
    """
    found = [
        [
            rank * placement.slots_per_rank + placement.experts[rank].index(expert)
            for rank in placement.ranks_of(expert)
        ]
        for expert in range(len(placement.loads))
    ]
    most = max(map(len, found))
    return [slots + [-1] * (most - len(slots)) for slots in found]


@torch.no_grad()
def sum_replicas(
    parameters: Iterable[nn.Parameter],
    placement: ExpertPlacement,
    group: ProcessGroup | None = None,
    collectives: Collectives = TORCH,
) -> None:
    """Give every replica of an expert the sum of their gradients; all ranks call it.

    Args:
        parameters: [experts of this rank, ...], in the order of the placement; one
            without a gradient counts as zeros.
    """
    rank, _ = rank_and_size(group)
    own = placement.experts[rank]
    common = [
        [] if peer == rank else [e for e in own if e in held]
        for peer, held in enumerate(placement.experts)
    ]
    sizes = [len(shared) for shared in common]
    place = [own.index(expert) for shared in common for expert in shared]
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        sent = gradient.flatten(1)[place]
        received = torch.empty_like(sent)
        collectives.all_to_all_single(received, sent, sizes, sizes, group).wait()
        theirs = iter(zip([e for s in common for e in s], received, strict=True))
        parts: dict[int, list[Tensor]] = {expert: [] for expert in own}
        for peer, size in enumerate(sizes):
            if peer == rank:
                for expert, mine in zip(own, gradient.flatten(1), strict=True):
                    parts[expert].append(mine.clone())
            for _ in range(size):
                expert, row = next(theirs)
                parts[expert].append(row)
        for row, expert in zip(gradient.flatten(1), own, strict=True):
            if len(parts[expert]) > 1:
                row.copy_(torch.stack(parts[expert]).sum(0))


def check_placement(placement: Any, num_experts: int, ranks: int) -> None:
    """ValueError unless it is of so many experts and ranks, each with an expert."""
    if not isinstance(placement, ExpertPlacement):
        kind = type(placement).__name__
        raise ValueError(f"placement is a {kind}, not an ExpertPlacement")
    found = len(placement.loads), len(placement.experts)
    if found != (num_experts, ranks):
        raise ValueError(
            f"a placement of {found[0]} experts on {found[1]} ranks, for a layer of "
            f"{num_experts} experts on {ranks} ranks"
        )
    empty = [rank for rank, held in enumerate(placement.experts) if not held]
    if empty:
        raise ValueError(f"ranks {empty} have no expert: each needs at least one")
