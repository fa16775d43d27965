"""Gradients of tensors that ask for them, by the rules of some operations.

What a check computes as its reference is differentiated here; what a file does in place
is not. An operation without a rule gives a tensor that asks for no gradient.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.base import Base
from torch.dtypes import int64
from torch.tensors import Tensor, of_values

Rule = Callable[..., Sequence[Any]]
"""From the gradient of a result, those of the arguments."""


class State:
    """Is anything differentiated at all, and not within another operation?"""

    on = False


class Node:
    """An operation that has made a tensor."""

    __slots__ = ("back", "inputs")

    def __init__(self, inputs: list[Tensor], back: Callable[[Tensor], Sequence[Any]]):
        self.inputs, self.back = inputs, back


def asks(value: Any) -> bool:
    return isinstance(value, Base) and value.requires_grad


def tracked(function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """The operation, whose result remembers how it was made."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not State.on or not any(map(asks, args)):
            return function(*args, **kwargs)
        State.on = False
        try:
            found = function(*args, **kwargs)
        finally:
            State.on = True
        several = isinstance(found, tuple)
        for place, one in enumerate(found if several else (found,)):
            if isinstance(one, Base) and one.is_floating_point():
                if any(one is arg for arg in args):
                    continue
                back = functools.partial(
                    rule, args=args, kwargs=kwargs, found=one, place=place, of=function
                )
                one.requires_grad, one.node = True, Node(list(args), back)
        return found

    return call


def backward(tensor: Tensor, gradient: Tensor | None = None) -> None:
    """Add the gradients of all leaves to their `grad`."""
    if not tensor.requires_grad:
        raise RuntimeError("element 0 of tensors does not require grad")
    State.on = False
    sums: dict[int, Tensor] = {id(tensor): full_of(tensor, gradient)}
    for one in reversed(in_order(tensor)):
        got = sums[id(one)]
        if one.node is None or one.retains:
            one.grad = got if one.grad is None else one.grad + got
        if one.node is None:
            continue
        parts = one.node.back(got)
        for given, part in zip(one.node.inputs, parts, strict=False):
            if asks(given) and part is not None:
                part = summed_to(part, given.shape)
                known = sums.get(id(given))
                sums[id(given)] = part if known is None else known + part
    State.on = True


def full_of(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    values = [1.0] * tensor.numel() if gradient is None else gradient.values()
    return of_values(list(values), tensor.shape, tensor.dtype)


def in_order(tensor: Tensor) -> list[Tensor]:
    """All that it was made of, each after what it needs."""
    seen: set[int] = set()
    found: list[Tensor] = []
    left: list[tuple[Tensor, bool]] = [(tensor, False)]
    while left:
        one, done = left.pop()
        if done:
            found.append(one)
        elif id(one) not in seen:
            seen.add(id(one))
            left.append((one, True))
            inputs = [] if one.node is None else one.node.inputs
            left += [(given, False) for given in inputs if asks(given)]
    return found


def summed_to(part: Tensor, shape: Sequence[int]) -> Tensor:
    """The sum over dims that were broadcast."""
    while part.dim() > len(shape):
        part = part.sum(0)
    for dim, length in enumerate(shape):
        if length == 1 and part.shape[dim] != 1:
            part = part.sum(dim, True)
    return part


# -- the rules --


def chosen(
    g: Tensor, args: Any, kwargs: Any, found: Tensor, place: int, of: Any
) -> Any:
    """Of a view, a copy or a choice: each number comes from one place."""
    x = args[0]
    numbers = of_values(list(range(x.numel())), x.shape, int64)
    places = of(numbers, *args[1:], **kwargs)
    places = places[place] if isinstance(places, tuple) else places
    total = [0.0] * x.numel()
    for at, value in zip(places.values(), g.values(), strict=True):
        total[at] += value
    return [of_values(total, x.shape, x.dtype)]


def best(g: Tensor, args: Any, kwargs: Any, found: Tensor, place: int, of: Any) -> Any:
    """Of topk: back to where the values were."""
    x, dim = args[0], kwargs.get("dim", args[2] if len(args) > 2 else -1)
    places = of(x.detach(), *args[1:], **kwargs)[1]
    return [x.new_zeros(x.shape).scatter_add_(dim, places, g)]


def each(derivative: Callable[[float, float], float]) -> Rule:
    """Of a function of each number, by the number and the result."""

    def rule(g: Tensor, args: Any, found: Tensor, **_: Any) -> Any:
        numbers = zip(g.values(), args[0].values(), found.values(), strict=True)
        values = [a * derivative(x, y) for a, x, y in numbers]
        return [of_values(values, g.shape, g.dtype)]

    return rule


def two(first: Callable[..., Any], second: Callable[..., Any]) -> Rule:
    """Of two operands; one may be a number."""

    def rule(g: Tensor, args: Any, **_: Any) -> Any:
        a, b = (x.detach() if isinstance(x, Base) else x for x in args)
        return [first(g, a, b), second(g, a, b)]

    return rule


def of_sum(g: Tensor, args: Any, kwargs: Any, found: Tensor, **_: Any) -> Any:
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if dim is not None and not keepdim:
        for one in sorted(
            x.dim_of(d) for d in ([dim] if isinstance(dim, int) else dim)
        ):
            g = g.unsqueeze(one)
    return [g.expand(x.shape)]


def of_mean(g: Tensor, args: Any, found: Tensor, **rest: Any) -> Any:
    share = g / (args[0].numel() / max(1, found.numel()))
    return of_sum(share, args=args, found=found, **rest)


def of_softmax(g: Tensor, args: Any, kwargs: Any, found: Tensor, **_: Any) -> Any:
    dim, p = kwargs.get("dim", args[1] if len(args) > 1 else -1), found.detach()
    return [p * (g - (g * p).sum(dim, True))]


def of_logsumexp(g: Tensor, args: Any, kwargs: Any, found: Tensor, **rest: Any) -> Any:
    x, dim = args[0].detach(), kwargs.get("dim", args[1] if len(args) > 1 else -1)
    wide = of_sum(g, args=args, kwargs=kwargs, found=found, **rest)[0]
    return [wide * x.softmax(dim)]


def of_masked(g: Tensor, args: Any, **_: Any) -> Any:
    return [g.masked_fill(args[1], 0.0)]


def of_matmul(g: Tensor, args: Any, **_: Any) -> Any:
    a, b = (x.detach() for x in args)
    return [g @ b.mT, a.mT @ g]


def of_einsum(g: Tensor, args: Any, **_: Any) -> Any:
    """Each operand's: the gradient with the other operands."""
    from torch.tensors import einsum

    left, _, right = args[0].replace(" ", "").partition("->")
    letters, operands = left.split(","), [x.detach() for x in args[1:]]
    parts: list[Any] = [None]
    for i, names in enumerate(letters):
        others = [n for j, n in enumerate(letters) if j != i]
        rest = [x for j, x in enumerate(operands) if j != i]
        equation = f"{','.join([right, *others])}->{names}"
        parts.append(einsum(equation, g, *rest))
    return parts


CHOSEN = (
    "view reshape flatten unflatten narrow split chunk tensor_split unsqueeze squeeze "
    "permute transpose t expand contiguous clone repeat_interleave index_select gather "
    "flip __getitem__"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(CHOSEN.split(" "), chosen),
    "topk": best,
    "exp": each(lambda x, y: y),
    "log": each(lambda x, y: 1 / x),
    "sigmoid": each(lambda x, y: y * (1 - y)),
    "tanh": each(lambda x, y: 1 - y * y),
    "square": each(lambda x, y: 2 * x),
    "sqrt": each(lambda x, y: 0.5 / y),
    "__neg__": each(lambda x, y: -1.0),
    "__add__": two(lambda g, a, b: g, lambda g, a, b: g),
    "__radd__": two(lambda g, a, b: g, lambda g, a, b: g),
    "__sub__": two(lambda g, a, b: g, lambda g, a, b: -g),
    "__rsub__": two(lambda g, a, b: -g, lambda g, a, b: g),
    "__mul__": two(lambda g, a, b: g * b, lambda g, a, b: g * a),
    "__rmul__": two(lambda g, a, b: g * b, lambda g, a, b: g * a),
    "__truediv__": two(lambda g, a, b: g / b, lambda g, a, b: -g * a / (b * b)),
    "__rtruediv__": two(lambda g, a, b: -g * b / (a * a), lambda g, a, b: g / a),
    "sum": of_sum,
    "mean": of_mean,
    "softmax": of_softmax,
    "logsumexp": of_logsumexp,
    "masked_fill": of_masked,
    "matmul": of_matmul,
    "__matmul__": of_matmul,
}


def requires_grad_(self: Tensor, wanted: bool = True) -> Tensor:
    """Ask for the gradient of this tensor."""
    self.requires_grad = wanted
    State.on = State.on or wanted
    return self


def retain_grad(self: Tensor) -> None:
    """Keep the gradient of a tensor that was made of others."""
    self.retains = True


def install() -> None:
    """Give tensors these rules."""
    for name, rule in RULES.items():
        setattr(Tensor, name, tracked(getattr(Tensor, name), rule))
    of: Any = Tensor
    of.T = property(lambda self: self.permute(list(reversed(range(self.dim())))))
    of.mT = property(lambda self: self.transpose(-2, -1))
    of.requires_grad_, of.retain_grad, of.backward = (
        requires_grad_,
        retain_grad,
        backward,
    )
