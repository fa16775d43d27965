"""The first tensor of a step that is not finite, and whether it came from elsewhere.

    rank 0   up_proj ok   down_proj: sends NaN --+             first: its own
                                                 all_reduce
    rank 1   up_proj ok   down_proj: sends ok ---+--> brings NaN      first: received

Communication spreads NaN, so the first one that a rank computes proves nothing. What a
call sends is looked at before it is sent, what it brings when it is over, and the
output of every module and each gradient between. The rank whose first one is its own is
to blame: what it computed from finite tensors is not finite.

NaN and plus infinity count. Minus infinity hides padding of the vocabulary and keys
that are not seen, so it is part of a healthy step.

Cost: a pass over each of these tensors, and a stop of the device for it: this is for
one step that is run again. It sends nothing.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from xtrain.comm.call_observer import CallObserver, tensors_of
from xtrain.comm.flight_recorder_calls import RecordedCall, line_of
from xtrain.pipeline_parallel.lost_ranks import exchange_by_peer
from xtrain.zero.fsdp_schedule import in_backward

AGREEMENT = exchange_by_peer.__code__.co_filename
"""Here a pipeline's ranks agree to begin a step and to end it: numbers, no tensors of
the step, and infinity among them."""


class First(NamedTuple):
    """The first tensor of a rank that is not finite."""

    received: bool
    """Another rank sent it."""
    backward: bool
    order: int
    """How many tensors were looked at before."""
    text: str


class Watch(CallObserver):
    """Looks at every tensor of the step that runs while it is entered.

    Args:
        parts: modules under the names of the whole model.

    Attributes: `first`, a `First`, or None.
    """

    def __init__(self, parts: Iterable[nn.Module]):
        self.parts, self.first = list(parts), None
        self._seen, self._place = 0, ""
        self._running: list[str] = []
        self._arriving: list[tuple[RecordedCall, list[Tensor]]] = []
        self._batch: list[RecordedCall] = []
        self._hooks: list[Any] = []

    first: First | None

    def __enter__(self) -> Self:
        for part in self.parts:
            for name, module in part.named_modules():
                name = name or type(module).__name__
                before = module.register_forward_pre_hook(partial(self._enters, name))
                after = module.register_forward_hook(partial(self._leaves, name))
                self._hooks += [before, after]
            for name, parameter in part.named_parameters():
                if parameter.requires_grad:
                    look = partial(self._gradient, f"gradient of {name}", "")
                    self._hooks.append(parameter.register_hook(look))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._arrived()
        for hook in self._hooks:
            hook.remove()

    # -- modules and gradients

    def _enters(self, name: str, *_: Any) -> None:
        self._running.append(name)

    def _leaves(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        while self._running and self._running.pop() != name:
            pass
        tensors = tensors_of(output)
        self._look(f"output of {name}", tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                what = f"gradient of the output of {name}"
                tensor.register_hook(partial(self._gradient, what, name))

    def _gradient(self, what: str, name: str, gradient: Tensor) -> None:
        self._look(what, [gradient])
        self._place = name or self._place

    # -- calls

    def observe(self, op: str, group: Any, args: Sequence[Any]) -> Any:
        call = RecordedCall(op, group.group_name, args)
        if line_of(sys._getframe(1))["filename"] == AGREEMENT:
            return call
        sent, received = sent_and_received(op, group, args)
        place = self._place if in_backward() or not self._running else self._running[-1]
        self._look(f"in {place or 'the model'}, what {op} sends", sent)
        self._arriving.append((call, received))
        return call

    def returned(self, kept: RecordedCall, work: Any) -> None:
        kept.follow(work)
        if work is None:
            self._batch.append(kept)

    def batch_returned(self, work: Any) -> None:
        for call in self._batch:
            call.follow(work)
        self._batch.clear()

    def _arrived(self) -> None:
        """Look at what calls that are over have brought."""
        waiting = []
        for call, tensors in self._arriving:
            if call.state() == "started":
                waiting.append((call, tensors))
            else:
                self._keep(f"what {call.op} brings", tensors, received=True)
        self._arriving = waiting

    def _look(self, what: str, tensors: Iterable[Tensor]) -> None:
        if self.first is None:
            self._arrived()
            self._keep(what, tensors, received=False)

    def _keep(self, what: str, tensors: Iterable[Tensor], received: bool) -> None:
        for tensor in tensors:
            self._seen += 1
            if self.first is None and (bad := not_finite(tensor)):
                backward = in_backward()
                phase = "backward" if backward else "forward"
                text = f"{phase}, {what}, {bad}"
                self.first = First(received, backward, self._seen, text)


def not_finite(tensor: Tensor) -> str:
    """What is wrong with a tensor, as "12 of 4,096 are nan ([64, 64], float32)"."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return ""
    values = tensor.detach()
    nan, inf = values.isnan(), values.isposinf()
    wrong = int((nan | inf).sum())
    if not wrong:
        return ""
    kinds = [word for word, found in (("nan", nan), ("inf", inf)) if found.any()]
    dtype = str(tensor.dtype).removeprefix("torch.")
    count = f"{wrong:,} of {tensor.numel():,} are {' or '.join(kinds)}"
    return f"{count} ({list(tensor.shape)}, {dtype})"


def sent_and_received(
    op: str, group: Any, args: Sequence[Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a call of a group sends, and those it writes to."""
    first = tensors_of(args[0]) if args else []
    if op == "send":
        return first, []
    if op.startswith("recv"):
        return [], first
    if op == "broadcast":
        is_root = getattr(args[-1], "rootRank", None) == group.rank()
        return (first, []) if is_root else ([], first)
    apart = len(args) > 1 and isinstance(args[1], (Tensor, list, tuple))
    return (tensors_of(args[1]) if apart else first), first


def without_compile() -> Any:
    """Layers that torch has compiled run without hooks; so they run as they are."""
    return torch.compiler.set_stance("force_eager")
