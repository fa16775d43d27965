"""Write down the tensors of a module's forward and backward where something is sent.

While a `Recorder` is open, the functions through which the layers of tensor parallelism
communicate keep their inputs, outputs and gradients, and every collective what it was
handed and what came out.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from xtrain.comm.collective_choice import Collectives, run_to_end

CUTTING = (
    "column_linear",
    "row_linear",
    "vocab_parallel_cross_entropy",
    "identity_all_reduce",
    "identity_all_reduce_wide",
    "all_reduce_identity",
    "split_all_gather",
    "all_gather_split",
    "all_gather_reduce_scatter",
    "reduce_scatter_all_gather",
    "identity_sum",
)
"""Functions that communicate, forward or backward, by their name in a module."""
PACKAGES = ("xtrain.comm.autograd", "xtrain.tensor_parallel", "xtrain.model")


@dataclass
class Point:
    """A tensor on its way: its numbers, and later its gradient's."""

    tensor: Tensor
    value: Tensor
    grad: Tensor | None = None


@dataclass
class Sent:
    """A collective: its name, what this rank handed over and what it got."""

    kind: str
    before: Tensor
    after: Tensor


@dataclass
class Call:
    """One call of a function of CUTTING."""

    function: str
    weights: list[str]
    sent: list[Sent] = field(default_factory=list)


class Recorder:
    """What happened, in order.

    Attributes:
        rows: groups of points that appear together, and the call that made them (None
            for something computed on each rank alone).
        backward: the collectives of the backward.
        stray: those of the forward that no function of CUTTING issued.
        shared: gradients of a whole weight before its sum, by the weight's name.
    """

    def __init__(self, module: nn.Module):
        self.rows: list[tuple[Call | None, list[Point]]] = []
        self.backward: list[Sent] = []
        self.stray: list[Sent] = []
        self.shared: dict[str, Point] = {}
        self._names = {p.data_ptr(): name for name, p in module.named_parameters()}
        self._calls: list[Call] = []
        self._forward = True

    def see(self, tensors: Iterable[Tensor], call: Call | None = None) -> None:
        """A group of tensors, unless it was seen before."""
        known = {id(point.tensor) for _, group in self.rows for point in group}
        new = [self._point(tensor) for tensor in tensors if id(tensor) not in known]
        if new:
            self.rows.append((call, new))

    def begin_backward(self) -> None:
        """From here on collectives belong to the backward."""
        self._forward = False

    def sent(self, kind: str, before: Tensor, after: Tensor) -> None:
        """A collective that has ended."""
        one = Sent(kind, before, after.detach().clone())
        if not self._forward:
            self.backward.append(one)
        elif self._calls:
            self._calls[-1].sent.append(one)
        else:
            self.stray.append(one)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of CUTTING and keep what went in and came out."""
        if self._calls or not self._forward:  # a part of the one under way
            return function(*args, **kwargs)
        weights = [name for name in map(self._name, tensors_of(args)) if name]
        self._calls.append(Call(function.__name__, weights))
        if self._name(args[0]):
            result = function(*args, **kwargs)
            self.shared[weights[0]] = self._point(result)
            self._calls.clear()
            return result
        self.see([args[0]])
        result = function(*args, **kwargs)
        call = self._calls.pop()
        self.see([result] if isinstance(result, Tensor) else result, call)
        return result

    def _name(self, tensor: Any) -> str | None:
        return self._names.get(tensor.data_ptr())

    def _point(self, tensor: Tensor) -> Point:
        point = Point(tensor, tensor.detach().clone())
        if tensor.requires_grad:

            def keep(grad: Tensor) -> None:
                point.grad = grad.detach().clone()

            tensor.register_hook(keep)
        return point


def tensors_of(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among arguments, also those in lists."""
    for one in arguments:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from tensors_of(one)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let all communication of the layers pass the recorder."""
    replaced = []
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES):
            for attribute, value in list(vars(module).items()):
                new = observed(recorder, attribute, value)
                if new is not None:
                    replaced.append((module, attribute, value))
                    setattr(module, attribute, new)
    plain = dist.all_reduce

    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        before = x.detach().clone()
        plain(x, op, group=group)
        largest = op == dist.ReduceOp.MAX
        recorder.sent("all-reduce MAX" if largest else "all-reduce", before, x)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = plain
        for module, attribute, value in replaced:
            setattr(module, attribute, value)


def observed(recorder: Recorder, name: str, value: Any) -> Any:
    """What stands for `value` while a recorder is open; None to leave it."""
    if isinstance(value, Collectives):
        return kept_by(recorder, value)
    if name == "default_collectives":
        return lambda *place: kept_by(recorder, value(*place))
    if name in CUTTING and callable(value):
        return lambda *args, **kwargs: recorder.call(value, *args, **kwargs)
    return None


def kept_by(recorder: Recorder, inner: Collectives) -> Collectives:
    """Collectives that run to their end at once and are written down."""

    def all_reduce(tensor: Tensor, *rest: Any, **options: Any) -> None:
        before = tensor.detach().clone()
        inner.all_reduce(tensor, *rest, **options).wait()
        recorder.sent("all-reduce", before, tensor)

    def written(kind: str, function: Callable[..., Any]) -> Callable[..., None]:
        def call(output: Tensor, x: Tensor, *rest: Any, **options: Any) -> None:
            before = x.detach().clone()
            function(output, x, *rest, **options).wait()
            recorder.sent(kind, before, output)

        return call

    def at_once(function: Callable[..., None]) -> Callable[..., Any]:
        return lambda *args, **kwargs: run_to_end(function, *args, **kwargs)

    return Collectives(
        inner.name,
        at_once(all_reduce),
        at_once(written("all-gather", inner.all_gather)),
        at_once(written("reduce-scatter", inner.reduce_scatter)),
        inner.all_to_all_single,
    )
