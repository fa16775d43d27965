"""The queue of gradients that a backward leaves for later.

    with DeferredGradients() as queue:     active while a forward runs
        y = module(x)                      its functions ask `stand_ins`
    queue.deferring = True                 a backward fills it
    queue.compute_deferred()               and this empties it

The part of the weights is a backward of its own, of one node for each queued call: so
W may be what autograd has made of a parameter (a cast, a transpose, a gathered view),
hooks run once and as early as they can, and each gradient is freed where it was added.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from xtrain.comm.deferred import QUEUES, Compute, Later, backward_always_runs

ACCUMULATE = "torch::autograd::AccumulateGrad"
KEEPS_NOTHING = {
    f"{name}Backward0"
    for name in ("ToCopy", "T", "Transpose", "Permute", "View", "Slice", "Split")
}
"""What may stand between a parameter and its use: autograd keeps no tensor for them,
and no activation can come in."""


class Queued(NamedTuple):
    """The gradients of one call: whose, how, and of what."""

    weights: tuple[Tensor, ...]
    compute: Compute
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]


class DeferredGradients(TorchFunctionMode):
    """Active while a forward runs, so that the functions called in it find it.

    (The mode is how a thread of autograd's own finds it, too, when a checkpoint
    computes a forward once more.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.deferring = False  # a backward is under way that leaves gradients here
        self.suspended = False  # another backward is under way inside the forward
        self._queue: deque[Queued] = deque()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    @property
    def kept_bytes(self) -> int:
        """Of the tensors that wait; one that several calls need counts once."""
        kept = {(t.data_ptr(), t.nbytes) for q in self._queue for t in q.tensors}
        return sum(nbytes for _, nbytes in kept)

    def stand_ins(self, *weights: Tensor) -> tuple[Later | None, tuple[Tensor, ...]]:
        """See the function; (None, weights) unless all of them are parameters."""
        waits = torch.is_grad_enabled() and not self.suspended
        if not waits or not all(map(may_wait, weights)):
            return None, weights
        return Deferral(self, weights), tuple(map(stand_in, weights))

    def compute_deferred(self) -> None:
        """Compute what waits, and add it to the gradients of the parameters."""
        roots = []
        with torch.enable_grad():
            while self._queue:  # autograd begins with the node that was made last
                roots.append(node_of(self._queue.pop()))
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])

    def forget_deferred(self) -> None:
        """Free what waits."""
        self._queue.clear()


class Deferral:
    """The `Later` of one call."""

    def __init__(self, owner: DeferredGradients, weights: tuple[Tensor, ...]):
        self._owner, self._weights = owner, weights

    def add(self, compute: Compute, *tensors: Tensor) -> None:
        """Have `compute(*tensors)` give the gradients of the weights, later."""
        if not self._owner.deferring:
            raise RuntimeError(
                "a forward inside split_backward() has its backward by backward_input "
                "and backward_weight of what that returned, or by its backward"
            )
        versions = tuple(tensor._version for tensor in tensors)
        self._owner._queue.append(Queued(self._weights, compute, tensors, versions))


def find_queue(*weights: Tensor) -> tuple[Later | None, tuple[Tensor, ...]]:
    """What `xtrain.comm.deferred.stand_ins` asks: is anything active here?"""
    mode = current()
    return (None, weights) if mode is None else mode.stand_ins(*weights)


QUEUES.append(find_queue)


def current() -> DeferredGradients | None:
    """What is active in this thread, the innermost."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeferredGradients):
            return mode
    return None


@contextmanager
def suspended() -> Iterator[None]:
    """Whatever runs inside leaves nothing for later: a backward within a forward.

    A checkpoint in it computes its own forward again, which is not this one.
    """
    mode = current()
    if mode is None:
        yield
        return
    before, mode.suspended = mode.suspended, True
    try:
        yield
    finally:
        mode.suspended = before


def stand_in(weight: Tensor) -> Tensor:
    """The same numbers, without what is behind them in autograd's graph.

    Autograd calls hooks with None for a gradient that does not come.
    """
    if backward_always_runs(weight.grad_fn):
        return weight
    return weight.detach().requires_grad_()


def may_wait(weight: Tensor) -> bool:
    """Whether it needs a gradient and is a parameter, or a cast or a view of one."""
    if not weight.requires_grad or type(weight) not in (nn.Parameter, Tensor):
        return False
    node: Any = weight.grad_fn
    if node is None:
        return isinstance(weight, nn.Parameter)
    while node.name() in KEEPS_NOTHING:
        node = node.next_functions[0][0]
    if node.name() == ACCUMULATE:
        return isinstance(node.variable, nn.Parameter)
    return backward_always_runs(node)


def node_of(queued: Queued) -> Tensor:
    """The end of a graph that leads to the weights."""
    return _WeightGradients.apply(queued, *queued.weights)


class _WeightGradients(torch.autograd.Function):
    """An empty tensor whose backward computes what was queued."""

    @staticmethod
    def forward(ctx: Any, queued: Queued, *weights: Tensor) -> Tensor:
        ctx.queued = queued
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        queued, ctx.queued = ctx.queued, None  # freed here, not after the last one
        if tuple(t._version for t in queued.tensors) != queued.versions:
            raise RuntimeError(
                "a tensor that waited for backward_weight has been written into: the "
                "gradients of weights need activations and gradients as they were"
            )
        return None, *queued.compute(*queued.tensors)
