"""Which experts each token goes to, and with which weight.

    token   experts_Tk   gates_Tk        kept_Tk
    0       3  0         0.7  0.3        yes yes
    1       3  2         0.6  0.4        yes no      expert 2 is full

A copy of token t goes to each of its k experts; the layer's output is the sum of their
outputs, each times its gate. Choosing has no gradient: experts are integers. The
gates do have one, and it reaches the scores of the chosen experts alone.

Source: Shazeer et al., Outrageously Large Neural Networks, 2017.

Shapes: T tokens, H hidden, E experts, k experts of a token, M kept copies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """What a router decides of T tokens.

    Attributes:
        experts_Tk: the chosen experts, int64, best first.
        gates_Tk: the weight of each one's output; differentiable.
        probabilities_TE: all scores of a token, with sum 1; differentiable.
        logits_TE: what the scores were made of.
        kept_Tk: False for a copy that is not computed: its expert is full, or its token
            is padding.
        mask_T: False for padding; None if there is none.
    """

    experts_Tk: Tensor
    gates_Tk: Tensor
    probabilities_TE: Tensor
    logits_TE: Tensor
    kept_Tk: Tensor
    mask_T: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.logits_TE.shape[1]

    @property
    def counts_E(self) -> Tensor:
        """How many copies each expert computes, int64.

        On torch's meta device, where there are shapes alone, equally many, as data.
        """
        if self.experts_Tk.is_meta:
            return even_counts(self.experts_Tk.numel(), self.num_experts)
        return count_experts(self.experts_Tk[self.kept_Tk], self.num_experts)

    @property
    def dropped(self) -> int:
        """How many copies of tokens (padding aside) no expert computes."""
        lost_Tk = ~self.kept_Tk
        if self.mask_T is not None:
            lost_Tk = lost_Tk & self.mask_T[:, None]
        return int(lost_Tk.sum())


def count_experts(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs, [E]."""
    return torch.bincount(experts.flatten(), minlength=num_experts)


def even_counts(copies: int, num_experts: int) -> Tensor:
    """Each expert's share of the copies, [E]; the first ones have one more."""
    experts_E = torch.arange(num_experts)
    return copies // num_experts + (experts_E < copies % num_experts).long()


def within_capacity(
    experts_Tk: Tensor,
    num_experts: int,
    capacity: int,
    wanted_Tk: Tensor | None = None,
) -> Tensor:
    """Which copies find room in their expert: [T, k], bool.

        capacity = ceil(T k / E * factor)       `xtrain.plan.expert_capacity`

    A factor of 1 is enough only if all experts are chosen equally often. Copies above
    the capacity are dropped: their token goes on without that expert. In return every
    expert's batch has a size that is known in advance. First choices of all tokens take
    their places before second choices do, and earlier tokens before later ones: which
    copies are dropped depends on the routing alone.

    Source: Lepikhin et al., GShard, 2020; Fedus et al., Switch Transformers, 2021.

    Args:
        wanted_Tk: False for copies that take no place, as those of padding.
    """
    if wanted_Tk is not None:
        experts_Tk = experts_Tk.masked_fill(~wanted_Tk, num_experts)
    experts_kT = experts_Tk.t().flatten()  # all first choices, then all second ones
    place = numbers_within(experts_kT, num_experts + 1)
    kept_Tk = (place < capacity).view(experts_Tk.shape[::-1]).t()
    return kept_Tk if wanted_Tk is None else kept_Tk & wanted_Tk


def numbers_within(experts_M: Tensor, num_experts: int) -> Tensor:
    """The how manyth copy for its expert each one is, from 0: [M]."""
    order = experts_M.argsort(stable=True)
    counts = count_experts(experts_M, num_experts)
    first = (counts.cumsum(0) - counts)[experts_M[order]]
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device) - first
    return number


def top_k_gradient(
    grad_values_Tk: Tensor, experts_Tk: Tensor, num_experts: int
) -> Tensor:
    """The backward of `scores_TE.gather(1, experts_Tk)`: [T, E].

    The gradient of each chosen value goes to its score; all others get zero.
    """
    zeros_TE = grad_values_Tk.new_zeros(len(grad_values_Tk), num_experts)
    return zeros_TE.scatter_add_(1, experts_Tk, grad_values_Tk)


def sort_copies(experts_Tk: Tensor, kept_Tk: Tensor, counts_E: Tensor) -> Tensor:
    """The kept copies sorted by expert, [M]: numbers of entries of the [T, k] table.

    Copies of one expert stay in the order of their tokens. Token = number // k.
    """
    num_experts = len(counts_E)
    sort_by = experts_Tk.masked_fill(~kept_Tk, num_experts).flatten()
    return sort_by.argsort(stable=True)[: int(counts_E.sum())]


def weighted_sum(rows_MH: Tensor, gates_Tk: Tensor, copies_M: Tensor) -> Tensor:
    """Each token's outputs times their gates, summed: [T, H].

    Args:
        rows_MH: outputs of the copies that were computed; the others count as zero.
        copies_M: which entry of the [T, k] table each row is of.
    """
    tokens, k = gates_Tk.shape
    table_TkH = rows_MH.new_zeros(tokens * k, rows_MH.shape[1])
    table_TkH = table_TkH.index_copy(0, copies_M, rows_MH)
    gates_T1k = gates_Tk.to(rows_MH.dtype).unsqueeze(1)
    return torch.bmm(gates_T1k, table_TkH.view(tokens, k, rows_MH.shape[1])).squeeze(1)
