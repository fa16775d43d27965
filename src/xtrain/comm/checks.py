"""Refuse a bad call before its first message leaves.

Every collective of `xtrain.comm` begins with `check_call`. Its rules are local: the
same program on every rank breaks them on every rank, so all raise and nobody waits.
What one rank cannot see alone (rank 0 passes 4 elements, rank 1 passes 5) needs a
question to the others. `debug_checks()` asks it before every call, at the price of one
small exchange:

    with debug_checks():              # or the environment variable XTRAIN_DEBUG=1
        ring_all_reduce(tensor)       # ValueError on every rank, with every rank's call
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.reduce_op import BITWISE, COMBINE, combine
from xtrain.comm.rounds import paused

_MISSING: Any = object()  # None is what a caller may pass by mistake
_debug = os.environ.get("XTRAIN_DEBUG", "0") not in ("", "0")


@contextmanager
def debug_checks(enabled: bool = True) -> Iterator[None]:
    """Compare every call of an `xtrain.comm` collective across ranks before it runs."""
    global _debug
    before, _debug = _debug, enabled
    try:
        yield
    finally:
        _debug = before


def group_or_world(group: ProcessGroup | None) -> ProcessGroup:
    """`group`, or the default group for None."""
    world = dist.group.WORLD
    if world is None:
        raise ValueError("no process group: call dist.init_process_group first")
    return world if group is None else group


def message_device(group: ProcessGroup | None) -> torch.device:
    """Where messages of our own making live: the CPU if the backend serves it."""
    cpu, served = torch.device("cpu"), group_or_world(group)._device_types
    return cpu if cpu in served else served[0]


def rank_and_size(group: ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in `group` and the group's size; ValueError outside it."""
    group = group_or_world(group)
    if not isinstance(group, ProcessGroup) or group.rank() < 0:
        # torch hands the int -100 to processes that are not members.
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of this group: only the "
            "ranks passed to new_group may use it"
        )
    return group.rank(), group.size()


def check_call(
    name: str,
    group: ProcessGroup | None,
    *tensors: Tensor,
    op: ReduceOp.RedOpType = _MISSING,
    whole: Tensor = _MISSING,
    compare: Sequence[object] | None = None,
    rules: Sequence[tuple[bool, str]] = (),
    written: Sequence[Tensor] | None = None,
    sends: Mapping[int, Tensor] | None = None,
    receives: Mapping[int, Tensor] | None = None,
    across: ProcessGroup | None = None,
) -> tuple[int, int]:
    """Check one collective call and return `rank_and_size(group)`.

    Args:
        tensors: all the call's tensors: one dtype, one device the backend serves.
        op: the reduce operation, checked against the dtype.
        whole: one more tensor, with as many elements as the first one has on all ranks.
        compare: what `debug_checks` compares across ranks besides dtype and op: a
            list or a tuple; the first tensor's shape unless given.
        rules: pairs (holds, message) of further conditions.
        written: the tensors that get a result; the first one unless given.
        sends, receives: tensors by rank at the other end, where ranks may differ:
            under `debug_checks` both ends must name the same shape.
        across: the mesh's other group, when the call runs over two axes of it.
    """
    rank, size = rank_and_size(group)
    if whole is not _MISSING:
        part = tensors[0]
        tensors = (*tensors, whole)
        message = f"{shape_of(whole)} must hold {size} times {shape_of(part)}"
        both = isinstance(whole, Tensor) and isinstance(part, Tensor)
        holds = both and whole.numel() == size * part.numel()
        rules = [(holds, message), *rules]
    problem = _problem(tensors, op, group, rules)
    if problem is None:
        problem = _overlap(tensors[:1] if written is None else written)
    if _debug:
        call = _Call(dist.get_rank(), name, problem)
        if problem is None:
            call.what = _describe_call(name, tensors, op, compare)
            call.sends = {peer: list(t.shape) for peer, t in (sends or {}).items()}
            call.receives = {r: list(t.shape) for r, t in (receives or {}).items()}
        _compare_across_ranks(name, call, group, across)
    if problem is not None:
        raise ValueError(f"{name}: {problem}")
    return rank, size


def shape_of(tensor: object) -> object:
    """For what is compared and told before it is known to be a tensor."""
    return list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__


def refuse(name: str, group: ProcessGroup | None, problem: str) -> NoReturn:
    """Raise ValueError for a collective call; under `debug_checks` on every rank."""
    check_call(name, group, rules=[(False, problem)])
    raise AssertionError("unreachable: the rule above does not hold")


def check_p2p(
    name: str,
    tensor: Tensor,
    group: ProcessGroup | None,
    contiguous: bool = False,
    written: bool = False,
) -> None:
    """Check the tensor of one send or receive."""
    problem = _problem((tensor,), _MISSING, group, ()) or _overlap((tensor,) * written)
    if problem is None and contiguous and not tensor.is_contiguous():
        problem = (
            f"needs a contiguous tensor, got shape {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}"
        )
    if problem is not None:
        raise ValueError(f"{name}: {problem}")


def _problem(
    tensors: Sequence[Any],
    op: ReduceOp.RedOpType,
    group: ProcessGroup | None,
    rules: Sequence[tuple[bool, str]],
) -> str | None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return f"expected a tensor, got {type(tensor).__name__}"
    if len({t.dtype for t in tensors}) > 1:
        return f"all tensors must have one dtype, got {_describe(tensors)}"
    if len({t.device for t in tensors}) > 1:
        return (
            f"all tensors must be on one device, got {[str(t.device) for t in tensors]}"
        )
    if tensors:
        tensor, served = tensors[0], group_or_world(group)._device_types
        if tensor.layout != torch.strided:
            return f"expected a dense tensor, got layout {tensor.layout}"
        if tensor.is_complex():
            return f"complex tensors are not supported, got {tensor.dtype}"
        if torch.device(tensor.device.type) not in served:
            return (
                f"tensor on {tensor.device}, but backend {dist.get_backend(group)} "
                f"serves {[d.type for d in served]}"
            )
    if op is not _MISSING:
        dtype = tensors[0].dtype
        if not isinstance(op, ReduceOp.RedOpType) or op not in COMBINE:
            return f"reduce op {_name(op)} is not one of {[_name(o) for o in COMBINE]}"
        if op == ReduceOp.AVG and not dtype.is_floating_point:
            return f"AVG needs a floating-point tensor, got {dtype}"
        if op in BITWISE and dtype.is_floating_point:
            return f"{_name(op)} needs an integer tensor, got {dtype}"
        if not _can_combine(op, dtype, tensors[0].device.type):
            return f"torch cannot compute {_name(op)} of {dtype} here"
    return next((message for holds, message in rules if not holds), None)


def _overlap(tensors: Sequence[Tensor]) -> str | None:
    for t in tensors:
        strides = zip(t.shape, t.stride(), strict=True)
        if not t.is_contiguous() and any(n > 1 and s == 0 for n, s in strides):
            return (
                f"cannot write into {list(t.shape)} with strides {list(t.stride())}: "
                "its elements share memory"
            )
    return None


@cache
def _can_combine(op: ReduceOp.RedOpType, dtype: torch.dtype, device: str) -> bool:
    one = torch.empty(1, dtype=dtype, device=device)
    try:
        combine(one, one.clone(), op)
    except RuntimeError:
        return False
    return True


@dataclass(slots=True)
class _Call:
    """What one rank tells the others about its call; shapes are keyed by group rank."""

    global_rank: int
    what: str
    problem: str | None
    sends: dict[int, list[int]] = field(default_factory=dict)
    receives: dict[int, list[int]] = field(default_factory=dict)


def _compare_across_ranks(
    name: str, call: _Call, group: ProcessGroup | None, across: ProcessGroup | None
) -> None:
    calls = [call]
    for axis in (group,) if across is None else (group, across):
        size = group_or_world(axis).size()
        gathered: list[list[_Call]] = [[] for _ in range(size)]
        if size > 1:
            with paused():
                dist.all_gather_object(gathered, calls, group=axis)
            calls = [call for part in gathered for call in part]
    faults = [
        f"rank {calls[src].global_rank} sends {shape} to rank {other.global_rank}, "
        f"which expects {other.receives.get(src)}"
        for dst, other in enumerate(calls)
        for src, shape in enumerate(c.sends.get(dst) for c in calls)
        if shape != other.receives.get(src)
    ]
    same = len({c.what for c in calls}) == 1
    if same and not faults and all(c.problem is None for c in calls):
        return
    lines = [
        f"rank {c.global_rank}: {c.what}" + (f" -> {c.problem}" if c.problem else "")
        for c in calls
    ]
    raise ValueError(
        f"{name}: the ranks of this group do not make one and the same legal call:"
        + "".join(f"\n  {line}" for line in lines + (faults if same else []))
    )


def _describe_call(
    name: str,
    tensors: Sequence[Tensor],
    op: ReduceOp.RedOpType,
    compare: Sequence[object] | None,
) -> str:
    if compare is None:
        compare = [list(t.shape) for t in tensors[:1]]
    what = [str(part) for part in compare]
    what += [str(t.dtype).removeprefix("torch.") for t in tensors[:1]]
    what += [_name(op)] if op is not _MISSING else []
    return f"{name}({', '.join(what)})"


def _describe(tensors: Sequence[Tensor]) -> str:
    return ", ".join(
        f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors
    )


def _name(op: object) -> str:
    return getattr(op, "name", str(op))
