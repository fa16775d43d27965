"""How `torch.amp.GradScaler` learns of an infinity in another rank's shard.

    rank 0   shards  . . . .   marker --+
    rank 1   shards  . inf .   marker --+--> largest `found_inf` of all --> all skip

GradScaler divides the gradients in an optimizer's `param_groups` by its scale and looks
for infinities in them, one operator call for each dtype and device. With shards the
infinity is one rank's alone, and a rank that skipped its step alone would leave the
others waiting. So next to the shards of each dtype and device there is an empty
parameter. The class of its empty gradient takes over that operator, as the tensors of
torch's own fully_shard do, and asks all ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import message_device

Unscale = Callable[[Tensor, Tensor], None]
NORMS = (torch._foreach_norm, torch.linalg.vector_norm, torch.norm, Tensor.norm)


class MarkerGradient(Tensor):
    """An empty gradient; `unscale(found_inf, inverse_scale)` speaks for all shards."""

    unscale: Unscale

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            gradients, found_inf, inverse_scale = args
            found = next(g for g in gradients if isinstance(g, cls))
            return found.unscale(found_inf, inverse_scale)
        if func in NORMS:
            raise RuntimeError(
                "the norm of param_groups' gradients would be that of one rank's "
                "shards: use ZeroOptimizer.clip_grad_norm_"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


def marker(dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without elements."""
    return nn.Parameter(torch.empty(0, dtype=dtype, device=device))


def mark(parameter: nn.Parameter, unscale: Unscale) -> None:
    """Give a marker its gradient."""
    gradient = torch.empty_like(parameter).as_subclass(MarkerGradient)
    gradient.unscale = unscale
    parameter.grad = gradient


@torch.no_grad()
def unscale_on_all_ranks(
    gradients: list[Tensor],
    found_inf: Tensor,
    inverse_scale: Tensor,
    group: ProcessGroup | None,
) -> None:
    """GradScaler's operator on shards: `found_inf` is 1 if any rank's have one."""
    if gradients:
        torch._amp_foreach_non_finite_check_and_unscale_(
            gradients, found_inf, inverse_scale
        )
    anywhere = found_inf.to(message_device(group))
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    found_inf.copy_(anywhere)
