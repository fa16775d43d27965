"""Compute by counted operations: what an accelerator would need for each operator.

    time of an operator = max(FLOPs / rate, bytes read and written / memory bandwidth)

(the roofline model: Williams, Waterman and Patterson, 2009). FLOPs are those of torch's
`flop_counter`; views and empty tensors take no time. Each rank has a `Device` of its
own, a dispatch mode: it sees the operators of its rank, forward and backward, and not
those by which the cluster moves bytes. They may be on the meta device: then nothing is
computed, and times and memory are what they would be; a program that asks one for its
numbers is told 0. What an operator makes of such tensors follows from their shapes, so
it is asked for once and remembered: torch finds out in Python for many of them, which
takes half a millisecond each time.

Memory is counted by storages: what an operator allocates lives until its storage is
freed or resized, as FSDP does with gathered weights.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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

BY_NUMBERS = {aten._local_scalar_dense, aten._to_copy, aten.bincount}
BY_INDEX = {aten.index_copy_, aten.index_copy, aten.index_select}
NUMBERS = (bool, int, float, str, torch.dtype, torch.device, torch.layout)


class Made(NamedTuple):
    """What an operator makes, and what it takes."""

    tensors: list[tuple[Any, ...]]
    """Size, stride and dtype of each."""
    alone: bool
    """One tensor, not a tuple of them."""
    flops: int
    nbytes: int


class Device(TorchDispatchMode):
    """The accelerator of one rank: how long its operators take, what memory they hold.

    Args:
        advance: called with the seconds that an operator takes.
        known: what operators make of meta tensors, for all ranks.

    Attributes:
        flops: counted so far.
        seconds: that the operators took; the rank's clock has advanced as much.
        allocated: bytes of storages that are alive.
        peak: the most bytes that were alive at a time.
        phase: what memory is for that is taken from now on, in a word of the program's.
        at_peak: bytes by phase when the most were alive.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        advance: Callable[[float], None],
        known: dict[Any, Made],
    ):
        super().__init__()
        self.accelerator, self._advance, self._known = accelerator, advance, known
        self.flops = self.allocated = self.peak = 0
        self.seconds = 0.0
        self.phase = ""
        self.at_peak: dict[str, int] = {}
        self._of_phase: dict[str, int] = {}
        self._births = self._peak_births = 0
        self._held: dict[int, Held] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prims") or func.is_view:
            return func(*args, **kwargs)  # of a collective the network tells the time
        key = key_of(func, args, kwargs)
        made = self._known.get(key) if key else None
        if made is None:
            return self._run(key, func, args, kwargs)
        results = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for size, stride, dtype in made.tensors
        ]
        for tensor in results:
            self.hold(tensor.untyped_storage())
        self._compute(made.flops, made.nbytes)
        return results[0] if made.alone else tuple(results)

    def _run(self, key: Any, func: Any, args: Any, kwargs: Any) -> Any:
        packet = func.overloadpacket
        if packet in BY_NUMBERS and args[0].is_meta:
            if packet is aten._local_scalar_dense:
                return 0
            if packet is aten._to_copy and kwargs.get("device") == torch.device("cpu"):
                kind = kwargs.get("dtype") or args[0].dtype
                return torch.zeros(args[0].shape, dtype=kind)
            if packet is aten.bincount:  # as short as it may be
                return self._run(key, aten.new_empty.default, (args[0], args[2:]), {})
        if packet in BY_INDEX and args[0].is_meta:  # places that the program knows
            args = (*args[:2], args[2].to("meta"), *args[3:])
        result = func(*args, **kwargs)
        made = tensors_of((result,))
        for tensor in made:
            self.hold(tensor.untyped_storage())
        flops = nbytes = 0
        if packet not in FREE:
            formula = FORMULAS.get(packet)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
            given = tensors_of((*args, *kwargs.values()))
            nbytes = sum(t.nbytes for t in (*given, *made))
            self._compute(flops, nbytes)
        alone = isinstance(result, Tensor)
        if key and (alone or (type(result) is tuple and len(made) == len(result))):
            kinds = [(tuple(t.shape), t.stride(), t.dtype) for t in made]
            if all(t.is_meta for t in made):
                self._known[key] = Made(kinds, alone, flops, nbytes)
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
        if known is None:
            self._births += 1
            reference = weakref.ref(storage, lambda _: self._free(key))
            known = self._held[key] = Held(reference, self.phase, self._births)
        if known.nbytes != nbytes:
            self._add(known.phase, nbytes - known.nbytes)
            known.nbytes = nbytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Of a storage that it holds."""
        if storage._cdata in self._held:
            self.hold(storage)

    def _add(self, phase: str, nbytes: int) -> None:
        self.allocated += nbytes
        self._of_phase[phase] = self._of_phase.get(phase, 0) + nbytes
        if self.allocated > self.peak:
            self.peak, self._peak_births = self.allocated, self._births
            self.at_peak = self._of_phase.copy()

    def _free(self, key: int) -> None:
        held = self._held.pop(key)
        self._add(held.phase, -held.nbytes)

    def name(self, tensor: Tensor, phase: str) -> None:
        """A tensor's memory is of this phase, whenever it was taken."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is not None and held.phase != phase:
            self._rename(held, phase)

    def rename(self, phase: str, name: str) -> int:
        """The same of all that is alive of a phase; how many bytes that are."""
        found = [held for held in self._held.values() if held.phase == phase]
        for held in found:
            self._rename(held, name)
        return sum(held.nbytes for held in found)

    def _rename(self, held: "Held", phase: str) -> None:
        move(self._of_phase, held.phase, phase, held.nbytes)
        if held.born <= self._peak_births:  # it was alive then, as it is now
            move(self.at_peak, held.phase, phase, held.nbytes)
        held.phase = phase

    def forget_peak(self) -> None:
        """Count the peak anew, from what is alive."""
        self.peak, self._peak_births = self.allocated, self._births
        self.at_peak = self._of_phase.copy()


@dataclass(slots=True)
class Held:
    """A storage that is alive."""

    reference: weakref.ref
    phase: str
    born: int
    """How many storages there had been."""
    nbytes: int = 0


def move(bytes_by_phase: dict[str, int], source: str, target: str, count: int) -> None:
    bytes_by_phase[source] = bytes_by_phase.get(source, 0) - count
    bytes_by_phase[target] = bytes_by_phase.get(target, 0) + count


def key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Of a call whose results follow from the shapes of meta tensors; else None."""
    if not makes_its_own(func):
        return None
    parts: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        if isinstance(value, Tensor):
            if not value.is_meta:
                return None
            parts.append((value.shape, value.stride(), value.dtype))
        elif value is None or isinstance(value, NUMBERS):
            parts.append((type(value), value))
        elif isinstance(value, list | tuple) and not any(
            isinstance(each, Tensor | list | tuple) for each in value
        ):
            parts.append(tuple(value))
        else:
            return None
    return tuple(parts) if len(parts) > 1 else None


@cache
def makes_its_own(func: Any) -> bool:
    """Whether an operator changes no argument and its results share none's memory."""
    schema = func._schema
    shared = any(result.alias_info is not None for result in schema.returns)
    return not schema.is_mutable and not shared


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among values and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


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

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


unseen = torch._C._DisableTorchDispatch
"""As a context: operators inside are the cluster's own, which no mode sees."""
