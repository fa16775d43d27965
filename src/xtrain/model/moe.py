"""The experts of a layer: whole, over expert ranks, and each cut over tensor ranks.

    experts 0 1 | 2 3        on 2 expert ranks
    each    rows of gate and up, columns of down: one half on each of 2 tensor ranks

    x replicated --> router, whole ------------------------> gates
               \\-f-> dispatch -> slices of experts -> combine -g-> y replicated

All tensor ranks route the same tokens alike. Each sends their copies to the expert
ranks that have the same slices as itself, and gets partial outputs back: their sum over
the tensor ranks (g) is y. The gradients of x and of the gates are partial, too, and
summed in backward (f). The router is outside: all ranks have its whole gradient.

Source: Lepikhin et al., GShard, 2020; Shoeybi et al., Megatron-LM, 2019 (f and g).

Shapes: T tokens, H hidden, k experts of a token.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import (
    all_gather_split,
    all_reduce_identity,
    identity_all_reduce,
    split_all_gather,
)
from xtrain.expert_parallel import GShardMoE, MoE, Routing
from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel import ParallelSwiGLU
from xtrain.tensor_parallel.shards import share


class TensorMoE(MoE):
    """A `MoE` whose experts each are cut along their inner size over tensor ranks.

    Args:
        intermediate_size, shared_intermediate_size: the full inner sizes.
        tensor: the ranks, which are called with the same tokens.
        sequence_parallel: input and output are this rank's slice of the sequence, [B,
            S / t, H]; between them every rank has all tokens.
        options: of a `MoE`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate_size: int = 0,
        tensor: ProcessGroup,
        sequence_parallel: bool = False,
        **options: Any,
    ):
        inner = share("moe_intermediate_size", intermediate_size, tensor)
        super().__init__(hidden_size, inner, num_experts, top_k, **options)
        self.tensor, self.sequence_parallel = tensor, sequence_parallel
        if shared_intermediate_size:
            self.shared = ParallelSwiGLU(  # type: ignore[assignment]
                hidden_size, shared_intermediate_size, group=tensor
            )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same tokens on every tensor rank, or its slice of each sequence."""
        if not self.sequence_parallel:
            return super().forward(x, mask)
        y = super().forward(all_gather_split(x, 1, self.tensor), mask)
        return split_all_gather(y, 1, self.tensor)

    def routed(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """What the routed experts add: the sum of what their slices do."""
        return self.after_experts(super().routed(*self.before_experts(x_TH, routing)))

    def before_experts(self, x_TH: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """f: each tensor rank has a part of the gradients of tokens and gates."""
        gates_Tk = identity_all_reduce(routing.gates_Tk, self.tensor)
        x_TH = identity_all_reduce(x_TH, self.tensor)
        return x_TH, replace(routing, gates_Tk=gates_Tk)

    def after_experts(self, y_TH: Tensor) -> Tensor:
        """g: each tensor rank has a part of the sum."""
        return all_reduce_identity(y_TH, self.tensor)


class TensorGShardMoE(TensorMoE, GShardMoE):
    """The same, and the experts lie over the ranks of `group`."""


def make_moe(
    config: XtrainConfig,
    expert: ProcessGroup | None = None,
    tensor: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    once_a_rank: bool = False,
) -> MoE:
    """The experts of one layer, as this rank has them."""
    assert config.moe_intermediate_size is not None
    inner = config.moe_intermediate_size
    sizes = (
        config.hidden_size,
        inner,
        config.num_local_experts,
        config.num_experts_per_tok,
    )
    options: dict[str, Any] = {
        "shared_intermediate_size": config.n_shared_experts * inner,
        "score": config.scoring_func,
        "renormalize": config.norm_topk_prob,
        "scale": config.routed_scaling_factor,
        "groups": config.n_group,
        "top_groups": config.topk_group,
        "balance_bias": config.balance_bias,
    }
    if expert is not None and expert.size() > 1:
        options |= {"group": expert, "once_a_rank": once_a_rank}
    if tensor is not None:
        options |= {"tensor": tensor, "sequence_parallel": sequence_parallel}
        kind = TensorGShardMoE if "group" in options else TensorMoE
        return kind(*sizes, **options)
    return (
        GShardMoE(*sizes, **options) if "group" in options else MoE(*sizes, **options)
    )
