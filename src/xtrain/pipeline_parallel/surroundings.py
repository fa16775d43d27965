"""What an operation reads besides its arguments: random numbers, autocast, modes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack

from xtrain.comm.accelerator import accelerator_in_use
from xtrain.comm.batch_rows import FIRST_ROW, rows_from


class Surroundings:
    """As they are when this is made, to be restored for a second run.

    Modes see every call of torch, as `with torch.device(...)` and `split_backward()`
    do. Those that the caller has left when backward runs are entered again.
    """

    def __init__(self, preserve_rng_state: bool):
        self.preserve_rng_state = preserve_rng_state
        if preserve_rng_state:
            self.cpu = torch.get_rng_state()
            self.device, self.module = accelerator_in_use()
            get_states = getattr(self.module, "get_rng_state_all", list)
            self.states: list[torch.Tensor] = get_states()
        accelerator = torch.accelerator.current_accelerator()
        devices = {"cpu", accelerator.type if accelerator else "cpu"}
        self.autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in devices
        }
        self.cache_enabled = torch.is_autocast_cache_enabled()
        self.modes = _get_current_function_mode_stack()
        self.first_row = FIRST_ROW.get()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was in forward; afterwards again as it is now."""
        active = _get_current_function_mode_stack()
        with ExitStack() as stack:
            stack.enter_context(rows_from(self.first_row))
            for mode in self.modes:
                if not any(mode is other for other in active):
                    stack.enter_context(mode)
            for kind, (dtype, enabled) in self.autocast.items():
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled, self.cache_enabled)
                )
            if self.preserve_rng_state:
                devices = range(len(self.states))
                forked = torch.random.fork_rng(devices, device_type=self.device)
                stack.enter_context(forked)
                torch.set_rng_state(self.cpu)
                for device, state in enumerate(self.states):
                    self.module.set_rng_state(state, device)
            yield
