"""Activation recompute: keep a function's inputs, and compute its activations again.

    forward     x -> [ function: a, b, c ] -> y         kept: x, and a random state
    backward                  dy arrives, and needs c:
                x -> [ function once more ]             a, b, c are there now
                dx <- [ the graph of forward ] <- dy    each is freed once it is used

Memory: L layers of A bytes each, of which I are their input, keep L I + A, not L A.
Time: one more forward. Messages: those of the forward once more, on all ranks.

There are two ways. A `torch.autograd.Function` that runs forward without a graph has to
call backward for a graph of its own inside backward: gradients of parameters do not
pass through the graph outside, so their hooks fire once per call, sharded models cannot
follow, and without an input that needs a gradient nothing is trained. Here forward's
own graph stays. Only its saved tensors are replaced by placeholders, with
`saved_tensors_hooks`, and the first placeholder that backward asks for has the function
run again. So whatever works without a checkpoint works in the same way with one:
integers, tensors within lists, an output that is an input, a second derivative.

The function runs to its end again, although the last saved tensor would do: all ranks
issue the same collectives, whatever each of them saves, and results can be compared.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; the hooks are
those of torch.utils.checkpoint with use_reentrant=False.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from xtrain.pipeline_parallel.surroundings import Surroundings


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, which backward runs again instead of keeping it.

    Tensors may be anywhere in lists, tuples and dictionaries of the arguments. Until
    its backward nothing that the function reads may be changed: an input that was is an
    error, but changed weights go unnoticed.

    Args:
        function: computes the same whenever it is called.
        preserve_rng_state: the second run draws the same random numbers. It costs a
            copy of torch's random state, about 5 KB, and may be left out if the
            function draws none.

    Raises:
        RuntimeError: in backward, if the function saves or returns tensors of other
            shapes, dtypes or numbers than in forward.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = _Call(function, args, kwargs, preserve_rng_state)
    with saved_tensors_hooks(call.placeholder, _recomputed):
        output = function(*args, **kwargs)
    call.output = _map(_describe, output)
    return output


class _Placeholder:
    """Takes the place in the graph of a tensor that forward would have kept."""

    def __init__(self, call: "_Call"):
        self.call = call
        self.tensor: Tensor | None = None  # from the second run until it is used
        self.version = 0


class _Call:
    """A call of a function, and all that it takes to repeat it.

    Placeholders own it, and it refers to them weakly: those that the graph has dropped
    get no tensor, and with the last one it is gone.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
    ):
        self.function = function
        tensors: list[Tensor] = []

        def take_out(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            tensors.append(leaf)
            return _Place(len(tensors) - 1)

        self.arguments = _map(take_out, (args, kwargs))
        # the tensors are kept as an operation's inputs are: a checkpoint around this
        # one can replace them, too, and one that was changed in place is an error;
        # the operation itself lives as long as its output (torch 2.11)
        anchor = torch.empty(0, requires_grad=True)
        self.inputs: Any = _KeepInputs.apply(anchor, *tensors)
        self.surroundings = Surroundings(preserve_rng_state)
        self.saved: list[tuple[weakref.ref[_Placeholder], str]] = []
        self.output: Any = None

    def placeholder(self, tensor: Tensor) -> _Placeholder:
        """What forward's graph keeps instead of a tensor."""
        placeholder = _Placeholder(self)
        self.saved.append((weakref.ref(placeholder), _describe(tensor)))
        return placeholder

    def repeat(self) -> None:
        """Run the function again, and fill the placeholders that are left."""
        args, kwargs = self._put_back()
        count = 0

        def fill(tensor: Tensor) -> Tensor:
            nonlocal count
            tensor = tensor.detach()  # or it would keep the graph of the second run
            if count < len(self.saved):
                placeholder, forward = self.saved[count][0](), self.saved[count][1]
                _compare(f"saves as tensor {count}", forward, _describe(tensor))
                if placeholder is not None:
                    placeholder.tensor, placeholder.version = tensor, tensor._version
            count += 1
            return tensor

        with (
            self.surroundings.restored(),
            torch.enable_grad(),
            saved_tensors_hooks(fill, lambda tensor: tensor),
        ):
            output = self.function(*args, **kwargs)
        if self.output is None:  # forward itself asked, for a gradient within it
            return
        _compare("saves", f"{len(self.saved)} tensors", f"{count} tensors")
        _compare("returns", self.output, _map(_describe, output))

    def _put_back(self) -> Any:
        tensors = self.inputs.grad_fn.saved_tensors
        return _map(
            lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf,
            self.arguments,
        )


def _recomputed(placeholder: _Placeholder) -> Tensor:
    """The tensor that backward needs now; nothing keeps it any longer."""
    if placeholder.tensor is None:
        placeholder.call.repeat()
    tensor, placeholder.tensor = placeholder.tensor, None
    assert tensor is not None  # it is alive, so it was filled
    if tensor._version != placeholder.version:
        raise RuntimeError(
            f"a tensor that backward needs, {_describe(tensor)}, was changed in place "
            "by the function after an operation had saved it"
        )
    return tensor


class _KeepInputs(torch.autograd.Function):
    """Has autograd keep tensors as the inputs of an operation, which computes nothing.

    Its output is part of no computation, so backward never frees what it keeps.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


class _Place:
    """Where among the arguments a tensor was."""

    def __init__(self, index: int):
        self.index = index


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dictionaries with every leaf changed.

    Other classes are leaves, also those derived from these.
    """
    if type(value) is dict:
        return {key: _map(change, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(change, item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(_map(change, item) for item in value))
    return change(value)


def _describe(leaf: Any) -> str:
    """What must not differ between the two runs."""
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    dtype = str(leaf.dtype).removeprefix("torch.")
    return f"{dtype}{list(leaf.shape)} on {leaf.device}"


def _compare(what: str, forward: Any, again: Any) -> None:
    if forward != again:
        raise RuntimeError(
            f"a function under checkpoint {what} {again}, but in forward {forward}: "
            "it must compute the same each time"
        )
