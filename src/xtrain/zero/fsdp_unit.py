"""A unit of a fully sharded model: what is gathered together and freed together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from xtrain.zero.flat_param_group import FlatParamGroup, FullGradients


@dataclass(frozen=True, eq=False, slots=True)
class UnitCall:
    """One call of a unit: a module may be called often, also in one forward."""

    forward: list["FSDPUnit"]  # all calls of the forward that it is part of, in order
    position: int  # in them

    @property
    def previous(self) -> "FSDPUnit | None":
        """The unit called before, which backward reaches next."""
        return self.forward[self.position - 1] if self.position > 0 else None


OnGradients = Callable[
    ["FSDPUnit", UnitCall | None, FlatParamGroup, FullGradients], None
]


class FSDPUnit:
    """A module and the flat groups of its parameters.

    Backwards of several calls may be under way at once; `active_backwards` has those
    that still need the weights.
    """

    def __init__(self, module: nn.Module, flat_groups: list[FlatParamGroup]):
        self.module, self.flat_groups = module, flat_groups
        self.trainable = [group for group in flat_groups if group.trainable]
        self.call: UnitCall | None = None  # the latest, of forward
        self.active_backwards: set[tuple[UnitCall | None, FlatParamGroup]] = set()
        self.uses_full_parameters = False

    def unshard(self) -> None:
        for group in self.flat_groups:
            group.unshard()

    def wait_for_unshard(self) -> None:
        for group in self.flat_groups:
            group.wait_for_unshard()

    def reshard(self) -> None:
        for group in self.flat_groups:
            group.reshard()

    def use_full_parameters(
        self, on_gradients: OnGradients, call: UnitCall | None = None
    ) -> None:
        """Compute with whole weights; in forward they are of the latest call."""
        call = call or self.call
        for group in self.flat_groups:
            group.use_full_parameters(partial(on_gradients, self, call, group))
        self.uses_full_parameters = True

    def use_shards(self) -> None:
        for group in self.flat_groups:
            group.use_shards()
        self.uses_full_parameters = False

    def enter_backward(self, call: UnitCall) -> None:
        needed = self.trainable or self.flat_groups
        self.active_backwards |= {(call, group) for group in needed}

    def leave_backward(
        self, call: UnitCall | None, group: FlatParamGroup, keep: bool
    ) -> None:
        """A call needs a group no more; free what none needs, unless told to `keep`."""
        self.active_backwards.discard((call, group))
        if not self.active_backwards:
            self.use_shards()
        if keep:
            return
        if not any(other is group for _, other in self.active_backwards):
            group.reshard()
        if not self.active_backwards:
            self.reshard()
