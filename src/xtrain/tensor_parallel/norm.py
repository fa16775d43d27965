"""RMSNorm on a tensor that is replicated, or split along the sequence.

The weight is whole on every rank. On a replicated input all ranks compute the same
gradient of it, and nothing may be summed. On a slice of the sequence each rank has seen
its own tokens only, so the gradients must be summed: f on the weight does that in every
backward, or the caller does it once a step, for all norms in one call.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import identity_all_reduce_wide
from xtrain.tensor_parallel.functions import gradients_by_autograd
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
        return rms_norm(x, weight, self.eps)


class RMSNorm(nn.RMSNorm):
    """torch's, over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """`F.rms_norm` over the last dim: x / sqrt(mean(x^2) + eps) * weight.

    On a CPU torch makes a dozen passes over memory of it, and `_RMSNorm` half as many.
    """
    on_cpu = x.device.type in ("cpu", "meta")  # meta: as a kernel would keep it
    if type(x) is Tensor and on_cpu and x.dtype == weight.dtype:
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return _by_torch(x, weight, eps)


def _by_torch(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """n = x / r with r = sqrt(mean(x^2) + eps);  dx = (g - n mean(g n)) / r, g = dy w

    x is kept and not n: what comes before often keeps x as well. 16-bit inputs are
    computed in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        return (x * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            norm, needed = partial(_by_torch, eps=ctx.eps), ctx.needs_input_grad[:2]
            return *gradients_by_autograd(norm, (x, weight), needed, grad), None
        n = x * inverse
        dx = dw = None
        if ctx.needs_input_grad[1]:
            dw = (grad * n).reshape(-1, len(weight)).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx = grad.to(n.dtype) * weight
            mean = (dx * n).mean(-1, keepdim=True)
            dx = dx.addcmul_(n, mean, value=-1).mul_(inverse).to(x.dtype)
        return dx, dw, None


def eps_of(norm: object) -> float | None:
    """Of torch's RMSNorm, or of one of transformers; None of anything else."""
    return getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
