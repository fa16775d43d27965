"""The experts of a layer: whole, over expert ranks, and each cut over tensor ranks.

    experts 0 1 | 2 3        on 2 expert ranks
    each    rows of gate and up, columns of down: one half on each of 2 tensor ranks

    x replicated --> router, whole ------------------------> gates
               \\-f-> dispatch -> slices of experts -> combine -g-> y replicated

All tensor ranks route the same tokens alike. Each sends their copies to the expert
ranks that have the same slices as itself, and gets partial outputs back: their sum over
the tensor ranks (g) is y. The gradients of x and of the gates are partial, too, and
summed in backward (f). The router is outside: all ranks have its whole gradient. A
shared expert is cut as the others are, and its part is added before the sum.

With sequence parallelism x is gathered before the router, and of both sums, of y and of
the gradient of x, a rank gets its slice of the sequence alone.

Source: Lepikhin et al., GShard, 2020; Shoeybi et al., Megatron-LM, 2019 (f and g).

Shapes: T tokens, H hidden, k experts of a token.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import (
    all_gather_split,
    all_reduce_identity,
    identity_all_reduce,
    reduce_scatter_all_gather,
)
from xtrain.expert_parallel import GShardMoE, MoE, Routing
from xtrain.model.config import XtrainConfig
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
        sizes = "shared_intermediate_size", shared_intermediate_size
        options[sizes[0]] = share(*sizes, tensor)
        super().__init__(hidden_size, inner, num_experts, top_k, **options)
        self.tensor, self.sequence_parallel = tensor, sequence_parallel

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same tokens on every tensor rank, or its slice of each sequence."""
        if self.sequence_parallel:
            x = all_gather_split(x, 1, self.tensor)
        return super().forward(x, mask)

    def before_experts(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """f: each tensor rank has a part of the gradients of tokens and gates."""
        gates_Tk = identity_all_reduce(routing.gates_Tk, self.tensor)
        if self.sequence_parallel:
            x = _IdentityReduceScatter.apply(x, self.tensor)
        else:
            x = identity_all_reduce(x, self.tensor)
        return x, replace(routing, gates_Tk=gates_Tk)

    def after_experts(self, y: Tensor) -> Tensor:
        """g: each tensor rank has a part of the sum."""
        if self.sequence_parallel:
            return reduce_scatter_all_gather(y, 1, self.tensor)
        return all_reduce_identity(y, self.tensor)


class _IdentityReduceScatter(torch.autograd.Function):
    """x [B, S, H]; backward sums all ranks' gradients, each its slice of the sequence.

    Elsewhere the gradient is zero: of x gathered, backward keeps that slice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = reduce_scatter_all_gather(grad, 1, ctx.group)
        before = ctx.group.rank() * own.shape[1]
        after = grad.shape[1] - before - own.shape[1]
        return F.pad(own, (0, 0, before, after)), None


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
