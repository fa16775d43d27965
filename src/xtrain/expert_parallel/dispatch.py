"""Dispatch and combine: copies of tokens to the ranks of their experts, and back.

    rank 0   copies sorted by expert   [for rank 0 | for rank 1]
    rank 1   copies sorted by expert   [for rank 0 | for rank 1]

    counts   each rank tells each how many copies it sends to each of its experts
    dispatch all-to-all of the copies; what arrives is sorted by expert once more
    combine  all-to-all back: what was received is sent, what was sent is received

Rank r of e has experts r L to (r + 1) L - 1, L = E / e. The backward of dispatch sends
as combine does, and that of combine as dispatch does, with the same splits. So four
all-to-alls a layer send k H elements a token each, in the dtype in which experts
compute, of which the share (e - 1) / e goes to other ranks if routing is uniform. Ranks
without tokens and experts without copies take part with none.

Several experts of a token may lie on one rank. With `plan_once_a_rank` the same four
all-to-alls send a token once to each rank that has any: see `once_a_rank`.

Source: Lepikhin et al., GShard, 2020; DeepSeek-AI, DeepEP, 2025 (once a rank).

Shapes: T tokens, H hidden, k experts of a token, e ranks, L experts of a rank, M copies
sent by this rank, N rows received by it.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.comm.autocast import cast_by_autocast
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.comm.work import Work
from xtrain.expert_parallel.routing import Routing, sort_copies, weighted_sum


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Who sends which copies to whom; dispatch and combine both follow it.

    Attributes:
        copies_M: this rank's kept copies sorted by expert, as numbers of entries of its
            [T, k] table; once a rank, of a [T, e] table of ranks.
        top_k: k, or e; copy c is of token c // k.
        sent_eL: how many copies go to each expert of each rank; once a rank, L = 1.
        received_eL: how many rows come from each rank for each expert of this one,
            once the counts have arrived.
    """

    copies_M: Tensor
    top_k: int
    sent_eL: Tensor
    received_eL: Tensor
    group: ProcessGroup | None
    collectives: Collectives = TORCH

    @property
    def tokens_M(self) -> Tensor:
        """The token of each copy."""
        return self.copies_M // self.top_k

    @cached_property
    def sent(self) -> list[int]:
        """How many copies go to each rank."""
        return self.sent_eL.sum(1).tolist()

    @cached_property
    def received(self) -> list[int]:
        """How many rows come from each rank; reading it waits for the device."""
        return self.received_eL.sum(1).tolist()

    @cached_property
    def counts_L(self) -> Tensor:
        """How many rows each expert of this rank gets."""
        return self.received_eL.sum(0)

    @cached_property
    def by_expert_N(self) -> Tensor:
        """The received rows' order by expert."""
        return order_by_expert(self.received_eL)


def plan_dispatch(
    routing: Routing,
    group: ProcessGroup | None = None,
    collectives: Collectives = TORCH,
) -> DispatchPlan:
    """Exchange counts, one all-to-all of E integers; the CPU waits for them.

    Raises:
        ValueError: the number of experts is not divisible by the group size.
    """
    return waited(issue_counts(routing, group, collectives))


def issue_counts(
    routing: Routing,
    group: ProcessGroup | None = None,
    collectives: Collectives = TORCH,
) -> tuple[Work, DispatchPlan]:
    """Begin to tell each rank how many copies its experts get from this one.

    The plan can be followed when the work has been waited for.
    """
    _, size = rank_and_size(group)
    local = experts_per_rank(routing.num_experts, size)
    counts_E = routing.counts_E
    copies_M = sort_copies(routing.experts_Tk, routing.kept_Tk, counts_E)
    top_k = routing.experts_Tk.shape[1]
    return _issued(copies_M, top_k, counts_E.view(size, local), group, collectives)


def plan_once_a_rank(
    routing: Routing,
    group: ProcessGroup | None = None,
    collectives: Collectives = TORCH,
) -> DispatchPlan:
    """As `plan_dispatch`, of a token to each rank with experts of it: e integers.

    Raises:
        ValueError: the number of experts is not divisible by the group size.
    """
    _, size = rank_and_size(group)
    local = experts_per_rank(routing.num_experts, size)
    reached_Te = routing.experts_Tk.new_zeros(len(routing.experts_Tk), size)
    reached_Te.scatter_add_(1, routing.experts_Tk // local, routing.kept_Tk.long())
    rank_M, token_M = (reached_Te.t() > 0).nonzero(as_tuple=True)
    sent_eL = (reached_Te > 0).sum(0)[:, None]
    copies_M = token_M * size + rank_M
    return waited(_issued(copies_M, size, sent_eL, group, collectives))


def _issued(
    copies_M: Tensor,
    top_k: int,
    sent_eL: Tensor,
    group: ProcessGroup | None,
    collectives: Collectives,
) -> tuple[Work, DispatchPlan]:
    received_eL = torch.empty_like(sent_eL)
    work = collectives.all_to_all_single(received_eL, sent_eL, group=group)
    plan = DispatchPlan(copies_M, top_k, sent_eL, received_eL, group, collectives)
    return Work([work], finish=lambda: plan.received), plan


def experts_per_rank(num_experts: int, ranks: int) -> int:
    """L; ValueError unless each rank gets as many."""
    if num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts on {ranks} ranks: num_experts must be divisible by "
            "the group size"
        )
    return num_experts // ranks


def order_by_expert(arriving_eL: Tensor) -> Tensor:
    """Rows come sorted by sender, then expert: their order by expert, then sender."""
    experts_eL = torch.arange(arriving_eL.shape[1], device=arriving_eL.device)
    experts_eL = experts_eL.expand_as(arriving_eL).flatten()
    return experts_eL.repeat_interleave(arriving_eL.flatten()).argsort(stable=True)


def issue_dispatch(copies_MH: Tensor, plan: DispatchPlan) -> tuple[Work, Tensor]:
    """Begin to send each copy to its expert: the rows [N, H] sorted by expert, which
    are there when the work has been waited for."""
    by_sender_NH = copies_MH.new_empty(sum(plan.received), *copies_MH.shape[1:])
    work = plan.collectives.all_to_all_single(
        by_sender_NH, copies_MH.contiguous(), plan.received, plan.sent, plan.group
    )
    rows_NH, order_N = torch.empty_like(by_sender_NH), plan.by_expert_N
    sort = partial(torch.index_select, by_sender_NH, 0, order_N, out=rows_NH)
    return Work([work], finish=sort), rows_NH


def issue_combine(rows_NH: Tensor, plan: DispatchPlan) -> tuple[Work, Tensor]:
    """Begin to send each row back to its token's rank: the copies [M, H], likewise."""
    by_sender_NH = rows_NH.new_empty(rows_NH.shape)  # contiguous, as rows may not be
    by_sender_NH[plan.by_expert_N] = rows_NH
    copies_MH = rows_NH.new_empty(sum(plan.sent), *rows_NH.shape[1:])
    work = plan.collectives.all_to_all_single(
        copies_MH, by_sender_NH, plan.sent, plan.received, plan.group
    )
    return work, copies_MH


def waited(under_way: tuple[Work, Any]) -> Any:
    """What a call under way fills, when it is filled."""
    work, result = under_way
    work.wait()
    return result


def dispatch(x_TH: Tensor, plan: DispatchPlan) -> Tensor:
    """Tokens -> the rows [N, H] of this rank's experts, sorted by expert, in the dtype
    in which they compute."""
    return send_copies(copies_of(x_TH, plan), plan)


def copies_of(x_TH: Tensor, plan: DispatchPlan) -> Tensor:
    """The copies [M, H] for the experts. Cast last, so that backward adds up those of a
    token in the dtype of x."""
    return cast_by_autocast(x_TH[plan.tokens_M])[0]


def send_copies(copies_MH: Tensor, plan: DispatchPlan) -> Tensor:
    """What goes with each copy, as it is -> the same of each row."""
    return _Dispatch.apply(copies_MH, plan)


def combine(rows_NH: Tensor, gates_Tk: Tensor, plan: DispatchPlan) -> Tensor:
    """What the experts made of the rows -> each token's weighted sum of it, [T, H]."""
    copies_MH = _Combine.apply(rows_NH, plan)
    return weighted_sum(copies_MH, gates_Tk, plan.copies_M)


def combine_sums(rows_NH: Tensor, tokens: int, plan: DispatchPlan) -> Tensor:
    """The same of rows that are weighted already: their sum for each of T tokens."""
    copies_MH = _Combine.apply(rows_NH, plan)
    zeros_TH = copies_MH.new_zeros(tokens, copies_MH.shape[1])
    return zeros_TH.index_add(0, plan.tokens_M, copies_MH)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies_MH: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return waited(issue_dispatch(copies_MH, plan))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None]:
        return waited(issue_combine(grad_NH, ctx.plan)), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return waited(issue_combine(rows_NH, plan))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MH: Tensor) -> tuple[Tensor, None]:
        return waited(issue_dispatch(grad_MH, ctx.plan)), None
