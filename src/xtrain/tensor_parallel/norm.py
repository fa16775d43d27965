"""RMSNorm on a tensor that is replicated, or split along the sequence.

The weight is whole on every rank. On a replicated input all ranks compute the same
gradient of it, and nothing may be summed. On a slice of the sequence each rank has seen
its own tokens only, so the gradients must be summed: f on the weight does that in every
backward, or the caller does it once a step, for all norms in one call.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import identity_all_reduce_wide
from xtrain.tensor_parallel.shards import check_features, placed_as


class ParallelRMSNorm(nn.Module):
    """`nn.RMSNorm` over the last dim, inside or outside a sequence-parallel region.

    Args:
        hidden_size: of the last dim.
        sequence_parallel: the input is this rank's slice of the sequence: sum the
            weight's gradient over the group in backward.
        sum_gradients: False leaves that sum to the caller.

    Shapes: [..., hidden_size] in and out.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = None,
        *,
        sequence_parallel: bool = False,
        sum_gradients: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.sequence_parallel, self.group = sequence_parallel, group
        self.sum_gradients = sum_gradients
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    @classmethod
    @torch.no_grad()
    def from_full(
        cls, full: nn.Module | Tensor, group: ProcessGroup | None = None, **options: Any
    ) -> Self:
        """A norm with the weight (and the eps) of `full`, an RMSNorm or its weight."""
        weight: Any = full if isinstance(full, Tensor) else full.weight
        options.setdefault("eps", eps_of(full))
        norm = cls(len(weight), **placed_as(weight), **options, group=group)
        norm.weight.copy_(weight)
        return norm

    def forward(self, x: Tensor) -> Tensor:
        check_features("ParallelRMSNorm", x, self.hidden_size)
        weight: Tensor = self.weight
        if self.sequence_parallel and self.sum_gradients:
            weight = identity_all_reduce_wide(weight, self.group)
        return F.rms_norm(x, (self.hidden_size,), weight, self.eps)


def eps_of(norm: object) -> float | None:
    """Of torch's RMSNorm, or of one of transformers; None of anything else."""
    return getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
