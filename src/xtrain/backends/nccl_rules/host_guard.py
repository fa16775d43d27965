# mypy: disable-error-code="attr-defined,no-untyped-call"
"""wait() that orders the stream and lets the program run on, as on a GPU.

After wait() a GPU program goes on at once: only what it computes on the device waits
for the call. Here it goes on when the call has not ended after a moment, and it stops
again where it first uses a tensor. Between the two it has seen what it would see on a
GPU: other programs that are not there yet, files that they have not written.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._autograd import _profiler_enabled as profiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode

if TYPE_CHECKING:
    from xtrain.backends.nccl_rules.streams import StreamWork

log = logging.getLogger(__name__)
WARN_SECONDS = 0.5  # that a program has run on, perhaps for what is not there yet
GRACE_SECONDS = 0.1  # a call that ends within is waited for: its errors come at once


class HostGuard(TorchFunctionMode):
    """Waits for the calls that the program has run past, before it uses a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: list[tuple[StreamWork, float]] = []

    def pass_by(self, work: "StreamWork") -> bool:
        """Let the program run past a wait; False where its next use is not seen."""
        self.settle()
        # `with torch.device()` and other modes take the last one off the stack at their
        # end, whichever that is; the default device's is at the bottom and stays.
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        modes = _get_current_function_mode_stack()
        if (
            any(mode is not self and mode is not default for mode in modes)
            or dispatch_modes()
            or threading.current_thread() is not threading.main_thread()
            or profiling()
            or not torch._C._is_torch_function_enabled()
            or torch._C._current_graph_task_id() != -1  # backward restores modes
            or torch.compiler.is_compiling()
        ):
            return False
        self._passed.append((work, time.monotonic()))
        if self not in _get_current_function_mode_stack():
            push_function_mode(self)
        return True

    def settle(self) -> None:
        """Wait for all calls that the program has run past, and stop watching it."""
        passed, self._passed = self._passed, []
        for work, since in passed:
            seconds = time.monotonic() - since
            if seconds > WARN_SECONDS and not work.operation.done:
                log.warning(
                    "the program ran on for %.1f s after wait() for %s, which was not "
                    "over: wait() orders the stream; barrier() stops the program",
                    seconds, work.operation.call,
                )  # fmt: skip
            work.wait_on_host()
        stack = _get_current_function_mode_stack()
        if stack and stack[-1] is self:
            pop_function_mode()

    # Recomputation enters the modes of the forward again, for as long as it lasts. It
    # gets nothing of this one, which comes and goes by itself.
    def __enter__(self) -> "HostGuard":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._passed:
            self.settle()
        return func(*args, **(kwargs or {}))
