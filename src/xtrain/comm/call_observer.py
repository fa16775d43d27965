"""Observers of a rank's calls: here the methods of groups are wrapped, once for all.

    program -> dist.all_reduce -> group.allreduce -> backend
                                       |
                                  observe, returned   of each observer of this rank

Every call of torch.distributed, ours included, ends in a method of a `ProcessGroup`.
While an observer is entered, these methods are wrapped: on torch's class and on its
subclasses, which are backends in Python. Calls that a call makes itself are not seen.
What torch's C++ calls on a group of its own (DDP's reducer and functional collectives
on gloo and NCCL) does not pass by here; torch's own flight recorder has it.

Cost: about 1 microsecond for each call, and what the observers do.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

OPS = {  # methods of a group, and torch's names for the calls
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
} | {
    name: name
    for name in (
        "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
        "allgather_coalesced", "barrier", "broadcast", "gather", "monitored_barrier",
        "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
        "reduce_scatter_single_coalesced", "scatter", "send",
    )
}  # fmt: skip


class CallObserver:
    """A context manager that sees each call of its rank; subclasses override what
    follows. Several may be entered, also in an order that is not nested.
    """

    rank: int

    def observe(self, op: str, group: Any, args: Sequence[Any]) -> Any:
        """A call begins; what is kept of it."""

    def returned(self, kept: Any, work: Any) -> None:
        """The method has returned its work; None: it is part of a batch."""

    def failed(self, kept: Any, error: BaseException) -> None:
        """The method has raised."""
        self.returned(kept, None)

    def batch_returned(self, work: Any) -> None:
        """The work of a batch."""

    def __enter__(self) -> Self:
        self.rank = dist.get_rank()
        METHODS.add(self)
        _OBSERVERS.set((*own_observers(), self))
        return self

    def __exit__(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        left = tuple(one for one in own_observers() if one is not self)
        _OBSERVERS.set(left or None)
        METHODS.remove(self)


# Of this rank. Empty inside a call, whose own calls are no calls of the program; None
# in a thread that no rank has started, as autograd's.
_OBSERVERS: ContextVar[tuple[CallObserver, ...] | None] = ContextVar(
    "call_observers", default=None
)


def own_observers() -> tuple[CallObserver, ...]:
    """Those that this rank has entered; none inside a call."""
    return _OBSERVERS.get() or ()


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples, as the arguments of a call."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors_of(value)]
    return []


class Methods:
    """The wrapped methods of this process, there as long as it has an observer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observers: list[CallObserver] = []
        self._originals: dict[tuple[Any, str], Any] = {}

    def add(self, observer: CallObserver) -> None:
        with self._lock:
            self._observers.append(observer)
        for cls in _with_subclasses(dist.ProcessGroup):
            for name, op in OPS.items():
                self.wrap(cls, name, functools.partial(_observed, op))
            self.wrap(cls, "_end_coalescing", _batch)

    def wrap(self, cls: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a method by `wrapper(method)` where it is defined, once."""
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        with self._lock:
            if not self._observers or owner is None or (owner, name) in self._originals:
                return
            self._originals[owner, name] = vars(owner)[name]
            method = getattr(owner, name)
            setattr(owner, name, functools.wraps(method)(wrapper(method)))

    def remove(self, observer: CallObserver) -> None:
        with self._lock:
            self._observers.remove(observer)
            if not self._observers:
                for (owner, name), original in self._originals.items():
                    setattr(owner, name, original)
                self._originals.clear()

    def of_process(self) -> tuple[CallObserver, ...]:
        """All of them, if they are of one rank and this thread belongs to it."""
        observers = tuple(self._observers)
        ranks = {one.rank for one in observers}
        return observers if len(ranks) == 1 and dist.get_rank() in ranks else ()


METHODS = Methods()


def _present() -> tuple[CallObserver, ...]:
    observers = _OBSERVERS.get()
    return METHODS.of_process() if observers is None else observers


def _observed(op: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        observers = _present()
        if not observers:
            return method(group, *args, **kwargs)
        values = (*args, *kwargs.values())
        kept = [(one, one.observe(op, group, values)) for one in observers]
        token = _OBSERVERS.set(())
        try:
            work = method(group, *args, **kwargs)
        except BaseException as error:
            for one, of_call in kept:
                one.failed(of_call, error)
            raise
        finally:
            _OBSERVERS.reset(token)
        for one, of_call in kept:
            one.returned(of_call, work)
        return work

    return call


def _batch(method: Callable[..., Any]) -> Callable[..., Any]:
    def end(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = method(group, *args, **kwargs)
        for one in _present():
            one.batch_returned(work)
        return work

    return end


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)
