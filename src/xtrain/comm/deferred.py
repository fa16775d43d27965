"""The queue of weight gradients that a backward leaves for later.

    F    y = x W^T      with DeferredGradients() as queue: the function asks `deferral`
    B    dx = dy W      queue.deferring = True: the function queues what dW needs
    W    dW = dy^T x    queue.compute_deferred(): computed, and added to W's gradient

Zero-bubble schedules run the two parts of backward apart. The weights' part is a
backward of its own, with one node for each queued call. So W may be a cast, a transpose
or a gathered view of a parameter, hooks run once and as early as they can, and the
tensors of a call are freed when its gradient has been added.

The active queue is a mode of torch's, which backward hands on to autograd's threads: a
checkpoint that computes a forward again there has to find the same queue. (A ContextVar
would stay with the caller's thread.)

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

ACCUMULATE = "torch::autograd::AccumulateGrad"
KEEPS_NOTHING = {
    f"{name}Backward0"
    for name in ("ToCopy", "T", "Transpose", "Permute", "View", "Slice", "Split")
}
"""What may stand between a parameter and its use: autograd keeps no tensor for them,
and no activation can come in."""

Compute = Callable[..., Sequence[Tensor | None]]


def deferral(*weights: Tensor) -> tuple["Deferral | None", tuple[Tensor, ...]]:
    """Where the gradients of these go, and what the function gets in their place.

    An autograd function that multiplies with weights asks this in forward, and keeps
    the answer in `ctx`. (None, weights) if no queue is active, or not all of them are
    parameters: then its backward returns all gradients.
    """
    queue = active_queue()
    return (None, weights) if queue is None else queue.deferral(*weights)


class Queued(NamedTuple):
    """The gradients of one call: whose, how, and of what."""

    weights: tuple[Tensor, ...]
    compute: Compute
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]


class DeferredGradients(TorchFunctionMode):
    """The queue of one forward, active while that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.deferring = False  # a backward is under way that leaves gradients here
        self.suspended = False  # another backward is under way inside the forward
        self.queue: deque[Queued] = deque()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    @property
    def kept_bytes(self) -> int:
        """Of the tensors that wait; one that several calls need counts once."""
        kept = {(t.data_ptr(), t.nbytes) for q in self.queue for t in q.tensors}
        return sum(nbytes for _, nbytes in kept)

    def deferral(
        self, *weights: Tensor
    ) -> tuple["Deferral | None", tuple[Tensor, ...]]:
        """What the function `deferral` returns if this queue is active."""
        waits = torch.is_grad_enabled() and not self.suspended
        if not waits or not all(map(may_wait, weights)):
            return None, weights
        return Deferral(self, weights), tuple(map(without_graph, weights))

    def compute_deferred(self) -> None:
        """Compute what waits, and add it to the gradients of the parameters."""
        roots = []
        with torch.enable_grad():
            while self.queue:  # autograd begins with the node that was made last
                weights = self.queue[-1].weights
                roots.append(_WeightGradients.apply(self.queue.pop(), *weights))
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


class Deferral:
    """Takes the weights' gradients of one call."""

    def __init__(self, owner: DeferredGradients, weights: tuple[Tensor, ...]):
        self._owner, self._weights = owner, weights

    def add(self, compute: Compute, *tensors: Tensor) -> None:
        """Have `compute(*tensors)` give the gradients of the weights, later.

        Nothing may write into the tensors until then. `compute` must not hold others.
        """
        if not self._owner.deferring:
            raise RuntimeError(
                "a forward inside split_backward() has its backward by backward_input "
                "and backward_weight of what that returned, or by its backward"
            )
        versions = tuple(tensor._version for tensor in tensors)
        self._owner.queue.append(Queued(self._weights, compute, tensors, versions))


def active_queue() -> DeferredGradients | None:
    """What is active in this thread, the innermost."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeferredGradients):
            return mode
    return None


@contextmanager
def suspended() -> Iterator[None]:
    """Calls inside queue nothing: a backward that runs within a forward.

    A checkpoint in that backward computes its own forward again, which is another one.
    """
    queue = active_queue()
    if queue is None:
        yield
        return
    before, queue.suspended = queue.suspended, True
    try:
        yield
    finally:
        queue.suspended = before


def without_graph(weight: Tensor) -> Tensor:
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


class BackwardAlwaysRuns(torch.autograd.Function):
    """Base of a function whose backward must run, with None for absent gradients.

    A weight that is the output of such a function keeps its place in the graph: the
    backward of the inputs reaches the function too.
    """


def backward_always_runs(node: object) -> bool:
    """Whether a tensor's `grad_fn` is of a `BackwardAlwaysRuns`."""
    return issubclass(getattr(node, "_forward_cls", object), BackwardAlwaysRuns)


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
