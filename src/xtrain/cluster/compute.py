"""Compute by counted operations: what an accelerator would need for each operator.

    time of an operator = max(FLOPs / rate, bytes read and written / memory bandwidth)

(the roofline model: Williams, Waterman and Patterson, 2009). FLOPs are those of torch's
`flop_counter`; views and empty tensors take no time. Each rank has a `Device` of its
own, a dispatch mode: it sees the operators of its rank, forward and backward, and not
those by which the cluster moves bytes. They may be on the meta device: then nothing is
computed, and times and memory are what they would be.

Memory is counted by storages: what an operator allocates lives until its storage is
freed or resized, as FSDP does with gathered weights.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop,
    sdpa_flop,
)

from xtrain.plan.hardware import Accelerator

aten = torch.ops.aten
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
FREE = {  # no byte is read or written
    aten._unsafe_view, aten.detach_, aten.empty, aten.empty_like, aten.empty_permuted,
    aten.empty_strided, aten.lift_fresh, aten.new_empty, aten.new_empty_strided,
    aten.resize_, aten.set_,
}  # fmt: skip


class Device(TorchDispatchMode):
    """The accelerator of one rank: how long its operators take, what memory they hold.

    Attributes:
        flops: counted so far.
        seconds: that the operators took; the rank's clock has advanced as much.
        allocated: bytes of storages that are alive.
        peak: the most bytes that were alive at a time.
    """

    def __init__(self, accelerator: Accelerator, advance: Callable[[float], None]):
        super().__init__()
        self.accelerator, self._advance = accelerator, advance
        self.flops = self.allocated = self.peak = 0
        self.seconds = 0.0
        self._held: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace not in ("aten", "prims"):
            return result  # a collective, for one: the network tells its time
        given, made = tensors_of(args, kwargs), tensors_of(result)
        for tensor in made:
            self.hold(tensor.untyped_storage())
        packet = func.overloadpacket
        if not func.is_view and packet not in FREE:
            formula = FORMULAS.get(packet)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
            self._compute(flops, sum(t.nbytes for t in (*given, *made)))
        return result

    def _compute(self, flops: int, nbytes: int) -> None:
        seconds = max(
            flops / self.accelerator.flops, nbytes / self.accelerator.memory_bandwidth
        )
        self.flops += flops
        self.seconds += seconds
        self._advance(seconds)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """A storage is there, perhaps new, perhaps of another size than before."""
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._held.get(key)
        if known is not None and known[1] == nbytes:
            return
        if known is None:
            reference = weakref.ref(storage, lambda _: self._free(key))
            self._held[key] = reference, nbytes
            self.allocated += nbytes
        else:
            self._held[key] = known[0], nbytes
            self.allocated += nbytes - known[1]
        self.peak = max(self.peak, self.allocated)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Of a storage that it holds."""
        if storage._cdata in self._held:
            self.hold(storage)

    def _free(self, key: int) -> None:
        self.allocated -= self._held.pop(key)[1]


def tensors_of(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def accelerator_of(what: str | Accelerator | None) -> Accelerator | None:
    """By name; ValueError lists those that are known."""
    return Accelerator.preset(what) if isinstance(what, str) else what


@contextmanager
def watching_resizes(device: Callable[[], Device | None]) -> Iterator[None]:
    """Tell the running rank's device of every storage that is resized."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        if (running := device()) is not None:
            running.resized(storage)
        return found

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


unseen = torch._C._DisableTorchDispatch
"""As a context: operators inside are the cluster's own, which no mode sees."""
