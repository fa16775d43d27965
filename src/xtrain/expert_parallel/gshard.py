"""GShard's expert parallelism: each rank has some of the experts and its own tokens.

    rank     router   experts     tokens
    0        whole    0 .. L-1    its own
    1        whole    L .. 2L-1   its own

    tokens -> router -> dispatch -> own experts -> combine -> weighted sum -> tokens

An expert sees the tokens of all ranks, so the gradient of its weights is already the
sum over them. The router and the shared expert see this rank's tokens only: their
gradients are to be summed over the ranks. Both are then of the same scale, that of a
loss which is a sum over all tokens (or is divided by the count of all).

With a `placement` a rank has the experts of that table, and popular experts lie on
several ranks: see `replicas`. With `once_a_rank` a token travels once to a rank that
has several of its experts.

Sources: Lepikhin et al., GShard, 2020; DeepSeek-AI, EPLB and DeepEP, 2025.

Shapes: T tokens, H hidden, k experts of a token, L experts of a rank.
"""

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.expert_parallel.checks import check_experts_call
from xtrain.expert_parallel.dispatch import (
    combine,
    dispatch,
    experts_per_rank,
    plan_dispatch,
)
from xtrain.expert_parallel.expert_placement import ExpertPlacement
from xtrain.expert_parallel.experts import Experts, RoutedExperts
from xtrain.expert_parallel.moe import MoE
from xtrain.expert_parallel.once_a_rank import once_a_rank
from xtrain.expert_parallel.replicas import check_placement, slots_of, sum_replicas
from xtrain.expert_parallel.routing import Routing


class GShardMoE(MoE):
    """A `MoE` whose experts lie on the ranks of `group`, as many on each.

    Every rank calls it with its own tokens, which may be none, and the outputs are
    those of the whole layer. A capacity is that of each rank's tokens.

    Args:
        intermediate_size, num_experts, top_k, ...: of the whole layer, as in `MoE`.
        once_a_rank: send a token once to each rank with experts of it, not once to
            each expert.
        placement: which experts lie on which ranks; in order unless given. Call
            `sum_replicas` after backward.
        collectives: whose all-to-all.

    Raises:
        ValueError: num_experts is not divisible by the group size, or the placement is
            of another layer; before any message.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        once_a_rank: bool = False,
        placement: ExpertPlacement | None = None,
        collectives: Collectives = TORCH,
        group: ProcessGroup | None = None,
        **options: Any,
    ):
        held = experts_of_rank(num_experts, placement, group)
        sizes = hidden_size, intermediate_size, num_experts, top_k
        options["kind"] = RoutedExperts if once_a_rank else Experts
        super().__init__(*sizes, local_experts=len(held), **options)
        self.once_a_rank, self.placement = once_a_rank, placement
        self.group, self.collectives = group, collectives

    @classmethod
    def from_full(
        cls,
        moe: MoE,
        group: ProcessGroup | None = None,
        *,
        once_a_rank: bool = False,
        placement: ExpertPlacement | None = None,
        collectives: Collectives = TORCH,
    ) -> Self:
        """This rank's part of `moe`, which all ranks hold alike: a copy of its experts,
        router and shared expert."""
        router, experts = moe.router, moe.experts
        held = list(experts_of_rank(router.num_experts, placement, group))
        layer = cls(
            router.hidden_size,
            experts.intermediate_size,
            router.num_experts,
            router.top_k,
            shared_intermediate_size=0 if moe.shared is None else moe.shared.size,
            backward=experts.backward,
            path=experts.path,
            once_a_rank=once_a_rank,
            placement=placement,
            collectives=collectives,
            group=group,
            device=router.weight.device,
            dtype=router.weight.dtype,
            **router.options(),
        )
        state = {
            name: tensor[held] if name.startswith("experts.") else tensor
            for name, tensor in moe.state_dict().items()
        }
        layer.load_state_dict(state)
        return layer

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """This rank's tokens [..., H], in and out; every rank of the group calls it."""
        check_experts_call("GShardMoE", x, mask, self, self.group)
        return super().forward(x, mask)

    def routed(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """What the routed experts add, wherever they are."""
        if self.placement is not None:
            routing = slots_of(routing, self.placement)
        exchange = self.group, self.collectives
        if isinstance(self.experts, RoutedExperts):
            return once_a_rank(x_TH, routing, self.experts, *exchange)
        plan = plan_dispatch(routing, *exchange)
        counts_L = plan.counts_L[: self.experts.num_experts]  # other slots are empty
        rows_NH = self.experts(dispatch(x_TH, plan), counts_L)
        return combine(rows_NH, routing.gates_Tk, plan)

    def sum_replicas(self) -> None:
        """After backward, on every rank of the group: sum the gradients of replicas."""
        if self.placement is not None:
            exchange = self.placement, self.group, self.collectives
            sum_replicas(self.experts.parameters(), *exchange)


def experts_of_rank(
    num_experts: int, placement: ExpertPlacement | None, group: ProcessGroup | None
) -> Sequence[int]:
    """Which experts this rank holds; ValueError unless they can be so."""
    rank, size = rank_and_size(group)
    if placement is not None:
        check_placement(placement, num_experts, size)
        return placement.experts[rank]
    local = experts_per_rank(num_experts, size)
    return range(rank * local, (rank + 1) * local)
