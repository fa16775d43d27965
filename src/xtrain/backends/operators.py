# mypy: disable-error-code="no-untyped-call"
"""A group's calls as operators, for tools that observe a program.

A TorchDispatchMode (CommDebugMode, FakeTensorMode, a user's own) and the profiler see a
collective of torch's backends as one operator, `c10d.allreduce_`, because these are
called through torch's dispatcher. A group in Python is called directly. So while a mode
or the profiler is active, a call goes through the dispatcher first:

    group.allreduce(...)  ->  c10d.allreduce_  ->  the modes, the innermost first
                          ->  GroupKernel, below all modes  ->  the method, unobserved

Fake tensors have no memory. A call that is given some sends nothing and is finished at
once, as with torch's own backends: that is how programs are traced.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from xtrain.backends.observers import (
    OwnDispatch,
    dispatch_modes,
    function_modes,
    has_own_dispatch,
    observed,
    profiling,
    unobserved,
    unrecorded,
)
from xtrain.backends.works import Finished

Method = Callable[..., dist.Work]
FAKE = _TorchDispatchModeKey.FAKE


def as_operator(name: str, method: Method) -> Method:
    """A group's method that goes through the dispatcher while a mode is active.

    Args:
        name: what torch calls the method.
    """

    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> dist.Work:
        try:
            # Not `observed`, which is slower: every call of a group comes by here.
            if not (dispatch_modes() or function_modes() or profiling()):
                return method(group, *args, **kwargs)
            if not observed() or not (dispatch_modes() or profiling()):
                with unobserved():
                    return method(group, *args, **kwargs)
        except OwnDispatch:
            pass
        return _dispatched(group, name, method, args, kwargs)

    return call


def _dispatched(
    group: Any, name: str, method: Method, args: tuple, kwargs: dict
) -> dist.Work:
    """Run the operator of the method's name, with the method as its kernel.

    Returns the work that the outermost mode returns: a mode may replace it.
    """
    with unrecorded(), OperatorCapture() as captured:
        getattr(group.cpp_group, name)(*args, **kwargs)
    func, shown = captured.func, list(captured.args)
    names = [argument.name for argument in func._schema.arguments]
    shown[names.index("process_group")] = group.boxed()
    kernel = GroupKernel(
        func, shown, lambda swap: method(group, *swap(args), **swap(kwargs))
    )
    with below_all_modes(kernel):
        result = func(*shown)
    work = result[-1] if isinstance(result, (tuple, list)) else result
    return dist.Work.unbox(work)


@contextmanager
def below_all_modes(lowest: TorchDispatchMode) -> Iterator[None]:
    """Enter a mode that gets an operator after all modes that are active already."""
    active = [_pop_mode() for _ in range(dispatch_modes())][::-1]
    for mode in (lowest, *active):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in (lowest, *active):
            _pop_mode()
        for mode in active:
            _push_mode(mode)


class Mode(TorchDispatchMode):
    """A dispatch mode that leaves torch.compile alone, whose import takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class OperatorCapture(Mode):
    """Captures the operator of a call, which is not run, and lets all others pass."""

    func: Any = None
    args: tuple = ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "c10d":  # a barrier makes a tensor first
            return func(*args, **(kwargs or {}))
        self.func, self.args = func, args
        return answer(func, args, Finished([]))


class GroupKernel(Mode):
    """Below all modes: runs a group's method in place of the operator's kernel.

    Args:
        shown: the operator's arguments as the modes get them.
        run: calls the method, its tensors exchanged by the function it is given.
    """

    def __init__(self, func: Any, shown: list, run: Callable[[Callable], dist.Work]):
        super().__init__()
        self._func, self._run = func, run
        self._before = tensors_in(shown)
        self.work: dist.Work | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not self._func:
            return func(*args, **(kwargs or {}))
        after = tensors_in(args)
        if any(isinstance(tensor, FakeTensor) for tensor in (*self._before, *after)):
            self.work = Finished(tensors_in(args[0]))
            return answer(func, args, self.work)
        if _get_dispatch_mode(FAKE) is not None:  # torch keeps it below all others
            return func(*args, **(kwargs or {}))  # it refuses real tensors
        if any(has_own_dispatch(tensor) for tensor in after):
            return NotImplemented  # their class takes them apart and calls again
        given = {id(old): new for old, new in zip(self._before, after, strict=True)}

        def swap(tree: Any) -> Any:
            return tree_map_only(Tensor, lambda t: given.get(id(t), t), tree)

        with unobserved():
            self.work = self._run(swap)
        return answer(func, args, self.work)


def answer(func: Any, args: Any, work: dist.Work) -> Any:
    """What an operator returns: its outputs, where it returns them, and the work."""
    boxed = work.boxed()
    return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
