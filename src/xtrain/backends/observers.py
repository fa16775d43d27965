# mypy: disable-error-code="attr-defined,no-untyped-call"
"""What observes tensor operations: dispatch modes, function modes, the profiler.

They observe the user's program. What a collective does with tensors of its own is
hidden from them, on every thread.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C._autograd import _enable_record_function as enable_recording
from torch._C._autograd import _profiler_enabled as profiling
from torch._C._autograd import _record_function_with_args_enter as begin_event
from torch._C._autograd import _record_function_with_args_exit as end_event

from xtrain.backends.operation import Operation

PLAIN = torch._C._disabled_torch_dispatch_impl
thread = threading.local()  # `.quiet` is True inside `unobserved`


def observed() -> bool:
    """True when a mode or the profiler observes this thread now."""
    watched = dispatch_modes() or function_modes() or profiling()
    return bool(watched) and not getattr(thread, "quiet", False)


@contextmanager
def unobserved() -> Iterator[None]:
    """No mode, tensor subclass or profiler sees what is done in here."""
    if getattr(thread, "quiet", False):
        yield
        return
    with (
        unrecorded(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
    ):
        thread.quiet = True
        try:
            yield
        finally:
            thread.quiet = False


@contextmanager
def unrecorded() -> Iterator[None]:
    """The profiler records no operator in here."""
    recorded = profiling()
    if recorded:
        enable_recording(False)
    try:
        yield
    finally:
        if recorded:
            enable_recording(True)


class OwnDispatch(ValueError):
    """A tensor's class handles operators itself: the call goes to the dispatcher."""


def has_own_dispatch(tensor: Tensor) -> bool:
    """True for a subclass that handles operators itself, as FakeTensor does."""
    return type(tensor).__torch_dispatch__ is not PLAIN


def record_event(name: str, operation: Operation, tensors: Sequence[Tensor]) -> None:
    """Inside `unobserved`: have the profiler show an operation, from now to its end."""
    enable_recording(True)
    event = begin_event(name, *tensors)
    enable_recording(False)
    operation.on_end.append(lambda: end_event(event))
