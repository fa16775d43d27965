"""GShard's expert parallelism: each rank has some of the experts and its own tokens.

    rank     router   experts     tokens
    0        whole    0 .. L-1    its own
    1        whole    L .. 2L-1   its own

    tokens -> router -> dispatch -> own experts -> combine -> weighted sum -> tokens

An expert sees the tokens of all ranks, so the gradient of its weights is already the
sum over them. The router and the shared expert see this rank's tokens only: their
gradients are to be summed over the ranks. Both are then of the same scale, that of a
loss which is a sum over all tokens (or is divided by the count of all).

Source: Lepikhin et al., GShard, 2020.

Shapes: T tokens, H hidden, k experts of a token, L experts of a rank.
"""

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
from xtrain.expert_parallel.moe import MoE
from xtrain.expert_parallel.routing import Routing


class GShardMoE(MoE):
    """A `MoE` whose experts lie on the ranks of `group`, as many on each.

    Every rank calls it with its own tokens, which may be none, and the outputs are
    those of the whole layer. A capacity is that of each rank's tokens.

    Args:
        intermediate_size, num_experts, top_k, ...: of the whole layer, as in `MoE`.
        collectives: whose all-to-all.

    Raises:
        ValueError: num_experts is not divisible by the group size; before any message.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        collectives: Collectives = TORCH,
        group: ProcessGroup | None = None,
        **options: Any,
    ):
        _, size = rank_and_size(group)
        local = experts_per_rank(num_experts, size)
        sizes = hidden_size, intermediate_size, num_experts, top_k
        super().__init__(*sizes, local_experts=local, **options)
        self.group, self.collectives = group, collectives

    @classmethod
    def from_full(
        cls,
        moe: MoE,
        group: ProcessGroup | None = None,
        *,
        collectives: Collectives = TORCH,
    ) -> Self:
        """This rank's part of `moe`, which all ranks hold alike: a copy of its experts,
        router and shared expert."""
        rank, size = rank_and_size(group)
        router, experts = moe.router, moe.experts
        local = experts_per_rank(router.num_experts, size)
        layer = cls(
            router.hidden_size,
            experts.intermediate_size,
            router.num_experts,
            router.top_k,
            shared_intermediate_size=0 if moe.shared is None else moe.shared.size,
            backward=experts.backward,
            path=experts.path,
            collectives=collectives,
            group=group,
            device=router.weight.device,
            dtype=router.weight.dtype,
            **router.options(),
        )
        mine = slice(rank * local, (rank + 1) * local)
        state = {
            name: tensor[mine] if name.startswith("experts.") else tensor
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
        plan = plan_dispatch(routing, self.group, self.collectives)
        rows_NH = self.experts(dispatch(x_TH, plan), plan.counts_L)
        return combine(rows_NH, routing.gates_Tk, plan)
