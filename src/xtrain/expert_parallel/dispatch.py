"""Dispatch and combine: copies of tokens to the ranks of their experts, and back.

    rank 0   copies sorted by expert   [for rank 0 | for rank 1]
    rank 1   copies sorted by expert   [for rank 0 | for rank 1]

    counts   each rank tells each how many copies it sends to each of its experts
    dispatch all-to-all of the copies; what arrives is sorted by expert once more
    combine  all-to-all back: what was received is sent, what was sent is received

Rank r of e has experts r L to (r + 1) L - 1, L = E / e. The backward of dispatch is the
way of combine and the other way round, with the same splits, so four all-to-alls a
layer send k H elements a token each, and the share (e - 1) / e of it to other ranks if
routing is uniform. Ranks without tokens, and experts without copies, take part with
none.

Source: Lepikhin et al., GShard, 2020.

Shapes: T tokens, H hidden, k experts of a token, e ranks, L experts of a rank, M copies
sent by this rank, N rows received by it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.comm.work import Work
from xtrain.expert_parallel.routing import Routing, sort_copies, weighted_sum


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Who sends which copies to whom; dispatch and combine both follow it.

    Attributes:
        copies_M: this rank's kept copies sorted by expert, as numbers of entries of its
            [T, k] table.
        top_k: k; copy c is of token c // k.
        sent: how many copies go to each rank.
        received: how many rows come from each rank.
        by_expert_N: the received rows' order by expert.
        counts_L: how many rows each expert of this rank gets.
    """

    copies_M: Tensor
    top_k: int
    sent: list[int]
    received: list[int]
    by_expert_N: Tensor
    counts_L: Tensor
    group: ProcessGroup | None
    collectives: Collectives = TORCH

    @property
    def tokens_M(self) -> Tensor:
        """Whose token each copy is."""
        return self.copies_M // self.top_k


def plan_dispatch(
    routing: Routing,
    group: ProcessGroup | None = None,
    collectives: Collectives = TORCH,
) -> DispatchPlan:
    """Exchange counts, one all-to-all of E integers; the CPU waits for them.

    Raises:
        ValueError: the experts do not divide by the ranks.
    """
    return issue_counts(routing, group, collectives).wait()


class PendingPlan:
    """Counts under way: `wait()` returns the plan."""

    def __init__(
        self,
        work: Work,
        sent_eL: Tensor,
        arriving_eL: Tensor,
        copies_M: Tensor,
        rest: tuple[int, ProcessGroup | None, Collectives],
    ):
        self.work, self.sent_eL, self.arriving_eL = work, sent_eL, arriving_eL
        self.copies_M, self.rest = copies_M, rest

    def wait(self) -> DispatchPlan:
        """What every rank sends to every other."""
        self.work.wait()
        arriving_eL, (top_k, group, collectives) = self.arriving_eL, self.rest
        return DispatchPlan(
            self.copies_M,
            top_k,
            self.sent_eL.sum(1).tolist(),
            arriving_eL.sum(1).tolist(),
            order_by_expert(arriving_eL),
            arriving_eL.sum(0),
            group,
            collectives,
        )


def issue_counts(
    routing: Routing,
    group: ProcessGroup | None = None,
    collectives: Collectives = TORCH,
) -> PendingPlan:
    """Begin to tell each rank how many copies its experts get from this one."""
    _, size = rank_and_size(group)
    local = experts_per_rank(routing.num_experts, size)
    counts_E = routing.counts_E
    copies_M = sort_copies(routing.experts_Tk, routing.kept_Tk, counts_E)
    sent_eL = counts_E.view(size, local)
    arriving_eL = torch.empty_like(sent_eL)
    work = collectives.all_to_all_single(arriving_eL, sent_eL, group=group)
    rest = routing.experts_Tk.shape[1], group, collectives
    return PendingPlan(work, sent_eL, arriving_eL, copies_M, rest)


def experts_per_rank(num_experts: int, ranks: int) -> int:
    """L; ValueError unless each rank gets as many."""
    if num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts on {ranks} ranks: each needs as many as the others"
        )
    return num_experts // ranks


def order_by_expert(arriving_eL: Tensor) -> Tensor:
    """Rows come sorted by sender, then expert: their order by expert, then sender."""
    experts_eL = torch.arange(arriving_eL.shape[1], device=arriving_eL.device)
    experts_eL = experts_eL.expand_as(arriving_eL).flatten()
    return experts_eL.repeat_interleave(arriving_eL.flatten()).argsort(stable=True)


class PendingRows:
    """Rows under way: `wait()` returns them."""

    def __init__(self, work: Work, landing: Tensor, order: Tensor | None = None):
        self.work, self.landing, self.order = work, landing, order

    def wait(self) -> Tensor:
        """In the order of their experts, or of the copies that were sent."""
        self.work.wait()
        return self.landing if self.order is None else self.landing[self.order]


def issue_dispatch(copies_MH: Tensor, plan: DispatchPlan) -> PendingRows:
    """Begin to send each copy to its expert; to become rows [N, H] sorted by expert."""
    landing_NH = copies_MH.new_empty(sum(plan.received), *copies_MH.shape[1:])
    work = plan.collectives.all_to_all_single(
        landing_NH, copies_MH.contiguous(), plan.received, plan.sent, plan.group
    )
    return PendingRows(work, landing_NH, plan.by_expert_N)


def issue_combine(rows_NH: Tensor, plan: DispatchPlan) -> PendingRows:
    """Begin to send each row back to its token's rank; to become copies [M, H]."""
    by_sender_NH = rows_NH.new_empty(rows_NH.shape)  # contiguous, as rows may not be
    by_sender_NH[plan.by_expert_N] = rows_NH
    landing_MH = rows_NH.new_empty(sum(plan.sent), *rows_NH.shape[1:])
    work = plan.collectives.all_to_all_single(
        landing_MH, by_sender_NH, plan.sent, plan.received, plan.group
    )
    return PendingRows(work, landing_MH)


def dispatch(x_TH: Tensor, plan: DispatchPlan) -> Tensor:
    """Tokens -> the rows [N, H] of this rank's experts, sorted by expert."""
    return _Dispatch.apply(x_TH[plan.tokens_M], plan)


def combine(rows_NH: Tensor, gates_Tk: Tensor, plan: DispatchPlan) -> Tensor:
    """What the experts made of the rows -> each token's weighted sum of it, [T, H]."""
    copies_MH = _Combine.apply(rows_NH, plan)
    return weighted_sum(copies_MH, gates_Tk, plan.copies_M)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies_MH: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return issue_dispatch(copies_MH, plan).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None]:
        return issue_combine(grad_NH, ctx.plan).wait(), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return issue_combine(rows_NH, plan).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MH: Tensor) -> tuple[Tensor, None]:
        return issue_dispatch(grad_MH, ctx.plan).wait(), None
