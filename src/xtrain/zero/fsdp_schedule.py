"""When a fully sharded model gathers, frees and reduces: hooks around its units.

    forward    unshard 0 | compute 0 | reshard 0
                     unshard 1 ..... | compute 1 | reshard 1
    backward                               unshard 1 | compute 1 | reshard 1, reduce 1
                                                 unshard 0 ..... | compute 0 | ...

Any number of forwards may come before their backwards, in any order, as in a pipeline.
Nothing of a forward is remembered but in its own graph: which unit was called when, so
that its backward knows what to prefetch.

Which collectives a rank issues follows from its calls alone, never from what the
program still holds: so ranks that make the same calls issue the same collectives.
"""

from typing import Any

import torch

from xtrain.comm.backward import Reducer
from xtrain.zero.flat_param_group import FlatParamGroup, FullGradients
from xtrain.zero.fsdp_unit import FSDPUnit, UnitCall
from xtrain.zero.structures import tensors_of


class UnitSchedule:
    """The hooks of all units, the root's first.

    Args:
        units: the root's is whole from the start of forward to the end of backward.
        reshard_after_forward: free the others' weights after forward, too.

    With replicas, sums over them are under way until backward is over.
    """

    def __init__(self, units: list[FSDPUnit], reshard_after_forward: bool):
        self.root, self.units = units[0], units
        self.reshard_after_forward = reshard_after_forward
        groups = (group for unit in units for group in unit.flat_groups)
        self.replicas = next(groups).replicas  # all have the same
        self.sync = True
        self.forward_order: list[FSDPUnit] = []  # of the forward before
        self.this_forward: list[FSDPUnit] = []  # units in the order of their calls
        self._keep_weights = False  # gathered in this no_sync, so not old
        self.reducer = Reducer(
            FlatParamGroup.start_reduce, self._end_of_backward, in_flight=1
        )
        for unit in units[1:]:
            unit.module.register_forward_pre_hook(
                lambda _, inputs, unit=unit: self._before_forward(unit, inputs)
            )
            unit.module.register_forward_hook(
                lambda _, __, output, unit=unit: self._after_forward(unit, output),
                always_call=True,
            )

    def set_sync(self, sync: bool) -> None:
        if self.sync != sync:
            self.sync, self._keep_weights = sync, False

    def begin_forward(self) -> None:
        """Have the root's weights. All others that are whole may be old: free them."""
        if not in_backward():
            self.this_forward = []
            if not self._keep_weights:
                self._free_all()
            self._keep_weights = not self.sync
        self.root.wait_for_unshard()
        self.root.use_full_parameters(self._gradients_ready)

    def end_forward(self, output: Any) -> None:
        if not in_backward():
            self.forward_order = self.this_forward
        if not torch.is_grad_enabled():
            self.root.use_shards()
            self._free(self.root)
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_root_backward())

    def reduce_gradients(self) -> None:
        """Reduce all gradients that backwards have left, whole or not yet summed over
        replicas; free all."""
        for unit in self.units:
            for group in unit.flat_groups:
                if group.full_grad is not None:
                    self.reducer.issue(group)
        self.reducer.finish()
        if self.replicas is not None:
            for unit in self.units:  # also what this backward did not reach
                for group in unit.flat_groups:
                    group.start_replica_sum()
            self.replicas.wait()
        self._keep_weights = False
        self._free_all()

    @torch._disable_dynamo  # the hooks of a unit that is compiled
    def _before_forward(self, unit: FSDPUnit, inputs: Any) -> None:
        unit.wait_for_unshard()
        if in_backward():  # activation checkpointing computes the unit once more
            unit.use_full_parameters(self._gradients_ready)
            return
        unit.call = UnitCall(self.this_forward, len(self.this_forward))
        self.this_forward.append(unit)
        unit.use_full_parameters(self._gradients_ready)
        if not unit.trainable:
            self._watch_inputs(unit, unit.call, inputs)
        following = len(self.this_forward)  # prefetch by the order of the one before
        order = self.forward_order
        if following < len(order) and order[following - 1] is unit:
            order[following].unshard()

    @torch._disable_dynamo
    def _after_forward(self, unit: FSDPUnit, output: Any) -> None:
        unit.use_shards()
        call = unit.call
        if in_backward():
            if unit.active_backwards:
                self._use_in_backward(unit, call)
            else:  # its own comes later, and gathers again
                self._free(unit)
        elif self.reshard_after_forward or not torch.is_grad_enabled():
            self._free(unit)
        if torch.is_grad_enabled() and call is not None:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._before_backward(unit, call))

    def _watch_inputs(self, unit: FSDPUnit, call: UnitCall, inputs: Any) -> None:
        """A frozen unit has no gradients to tell that its backward is over."""
        entries = [t for t in tensors_of(inputs) if t.requires_grad]
        if torch.is_grad_enabled() and len(entries) == 1:
            for group in unit.flat_groups:
                entries[0].register_hook(
                    lambda _, group=group: unit.leave_backward(
                        call, group, self._keeps(unit)
                    )
                )

    def _before_root_backward(self) -> None:
        self._enter_backward()
        self.root.wait_for_unshard()
        if not self.root.uses_full_parameters:  # checkpointing may compute with them
            with torch.enable_grad():
                self.root.use_full_parameters(self._gradients_ready)

    def _before_backward(self, unit: FSDPUnit, call: UnitCall) -> None:
        self._enter_backward()
        unit.wait_for_unshard()
        unit.enter_backward(call)
        self._use_in_backward(unit, call)
        if call.previous is not None:
            call.previous.unshard()

    def _use_in_backward(self, unit: FSDPUnit, call: UnitCall | None) -> None:
        """Checkpoints inside the unit compute with its weights once more."""
        with torch.enable_grad():
            unit.use_full_parameters(self._gradients_of_part, call)

    def _gradients_of_part(
        self,
        unit: FSDPUnit,
        call: UnitCall | None,
        group: FlatParamGroup,
        gradients: FullGradients,
    ) -> None:
        """Those of a reentrant checkpoint inside a unit, whose others come later."""
        group.add_full_gradients(gradients)

    def _enter_backward(self) -> None:
        if self.reducer.enter_backward():
            for unit in self.units:  # of a backward that failed
                unit.active_backwards.clear()
            if self.replicas is not None:
                self.replicas.abandon()

    def _gradients_ready(
        self,
        unit: FSDPUnit,
        call: UnitCall | None,
        group: FlatParamGroup,
        gradients: FullGradients,
    ) -> None:
        """All gradients of a call are there: its weights are free to go."""
        self._enter_backward()
        if unit is not self.root:  # the root's are needed to the end
            unit.leave_backward(call, group, self._keeps(unit))
        group.add_full_gradients(gradients)
        if self.sync:
            self.reducer.issue(group)

    def _end_of_backward(self) -> None:
        """Gradients are ready; nothing is whole any more but what no_sync keeps."""
        if self.sync:
            self.reduce_gradients()
        else:
            self._free_all()

    def _keeps(self, unit: FSDPUnit) -> bool:
        """Whether a unit's weights stay whole for the next micro-batch."""
        stays = unit is self.root or not self.reshard_after_forward
        return self._keep_weights and stays

    def _free(self, unit: FSDPUnit) -> None:
        if not self._keeps(unit):
            unit.reshard()

    def _free_all(self) -> None:
        for unit in self.units:
            unit.active_backwards.clear()
            self._free(unit)
            if unit is not self.root or not self._keeps(unit):
                unit.use_shards()


def in_backward() -> bool:
    """Whether this code runs inside `backward()`."""
    return torch._C._current_graph_task_id() >= 0
