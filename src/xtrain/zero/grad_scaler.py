"""Let `torch.amp.GradScaler` see an infinity in any rank's shard.

    rank 0   shards  . . . .   marker --+
    rank 1   shards  . inf .   marker --+--> largest `found_inf` of all --> all skip

GradScaler divides the gradients in an optimizer's `param_groups` by its scale and looks
for infinities in them, one operator call for each dtype and device. With shards the
infinity is on one rank only, and if that rank alone skipped its step, the others would
wait for it, or have other weights. So the class of a gradient takes over that
operator, as the tensors of torch's own fully_shard do, and asks all ranks. The shards'
gradients of FSDP are of such a class. Those of ZeRO 1 and 2 are made in the step, so
next to the shards of each dtype and device there is an empty parameter whose empty
gradient speaks for them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.backward import weakly
from xtrain.comm.checks import message_device
from xtrain.zero.buckets import ShardedBucket

Kind = tuple[torch.dtype, torch.device]
UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
NORMS = (torch._foreach_norm, torch.linalg.vector_norm, torch.norm, Tensor.norm)


class MarkerGradient(Tensor):
    """An empty gradient; `unscale(found_inf, inverse_scale)` speaks for all shards."""

    unscale: Callable[[Tensor, Tensor], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is UNSCALE:
            gradients, found_inf, inverse_scale = args
            found = next(g for g in gradients if isinstance(g, cls))
            return found.unscale(found_inf, inverse_scale)
        if func in NORMS:
            raise RuntimeError(
                "the norm of param_groups' gradients would be that of one rank's "
                "shards: use ZeroOptimizer.clip_grad_norm_"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


class Markers:
    """Of each dtype and device of the shards an empty parameter; see above.

    Args:
        buckets: the masters of these are unscaled, also of those added later.
        reduce: has the gradients of all masters reduced.
    """

    def __init__(
        self,
        buckets: list[ShardedBucket],
        reduce: Callable[[], None],
        group: ProcessGroup | None,
    ):
        self._buckets, self._reduce, self._group = buckets, reduce, group
        self._parameters: dict[Kind, nn.Parameter] = {}

    def add(self) -> list[nn.Parameter]:
        """One for each kind that has none yet; returns the new ones."""
        kinds = dict.fromkeys(bucket.kind for bucket in self._buckets)
        new = [kind for kind in kinds if kind not in self._parameters]
        for dtype, device in new:
            empty = torch.empty(0, dtype=dtype, device=device)
            self._parameters[dtype, device] = nn.Parameter(empty)
        return [self._parameters[kind] for kind in new]

    def set(self) -> None:
        """Give each its gradient."""
        for kind, parameter in self._parameters.items():
            gradient = torch.empty_like(parameter).as_subclass(MarkerGradient)
            gradient.unscale = partial(weakly(self._unscale), kind)
            parameter.grad = gradient

    @torch.no_grad()
    def _unscale(self, kind: Kind, found_inf: Tensor, inverse_scale: Tensor) -> None:
        """GradScaler's operator on shards: `found_inf` is 1 if any rank's have one."""
        self._reduce()
        masters = [b.master for b in self._buckets if b.kind == kind]
        gradients = [m.grad for m in masters if m.grad is not None]
        if gradients:
            UNSCALE(gradients, found_inf, inverse_scale)
        ask_all_ranks(found_inf, self._group)

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


class ShardGradient(Tensor):
    """The gradient of a rank's shard: a tensor like any other but for GradScaler."""

    process_group: ProcessGroup | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func is UNSCALE:
            gradients, found_inf, _ = args
            shards = [g for g in gradients if isinstance(g, cls)]
            for group in dict.fromkeys(shard.process_group for shard in shards):
                ask_all_ranks(found_inf, group)
        return result

    # a copy is an ordinary tensor
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


def shard_gradient(gradient: Tensor, group: ProcessGroup | None) -> Tensor:
    """The same memory; GradScaler asks all ranks of the group about it."""
    shard = gradient.as_subclass(ShardGradient)
    shard.process_group = group
    return shard


def ask_all_ranks(found_inf: Tensor, group: ProcessGroup | None) -> None:
    """Let `found_inf` be the largest of all ranks."""
    anywhere = found_inf.to(message_device(group))
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    found_inf.copy_(anywhere)
