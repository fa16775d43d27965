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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.ledger import paused
from xtrain.comm.reduce_op import BITWISE, COMBINE

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
    op: ReduceOp.RedOpType | None = None,
    whole: Tensor | None = None,
    compare: object = None,
    rules: Sequence[tuple[bool, str]] = (),
) -> tuple[int, int]:
    """Check one collective call and return `rank_and_size(group)`.

    Args:
        tensors: all the call's tensors: one dtype, one device the backend serves.
        op: the reduce operation, checked against the dtype.
        whole: one more tensor, with as many elements as the first one has on all ranks.
        compare: what `debug_checks` compares across ranks besides dtype and op; the
            first tensor's shape unless given.
        rules: pairs (holds, message) of further conditions.
    """
    rank, size = rank_and_size(group)
    if whole is not None:
        part = tensors[0]
        tensors = (*tensors, whole)
        message = f"{list(whole.shape)} must hold {size} times {list(part.shape)}"
        rules = [(whole.numel() == size * part.numel(), message), *rules]
    problem = _problem(tensors, op, group, rules)
    if _debug and size > 1:
        call = _describe_call(name, tensors, op, compare)
        _compare_across_ranks(name, call, problem, group, size)
    if problem is not None:
        raise ValueError(f"{name}: {problem}")
    return rank, size


def check_p2p(name: str, tensor: Tensor, group: ProcessGroup | None) -> None:
    """Check the tensor of one send or receive."""
    problem = _problem((tensor,), None, group, ())
    if problem is not None:
        raise ValueError(f"{name}: {problem}")


def _problem(
    tensors: Sequence[Any],
    op: ReduceOp.RedOpType | None,
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
    if op is not None:
        dtype = tensors[0].dtype
        if op not in COMBINE:
            return f"reduce op {_name(op)} is not one of {[_name(o) for o in COMBINE]}"
        if op == ReduceOp.AVG and not dtype.is_floating_point:
            return f"AVG needs a floating-point tensor, got {dtype}"
        if op in BITWISE and dtype.is_floating_point:
            return f"{_name(op)} needs an integer tensor, got {dtype}"
    return next((message for holds, message in rules if not holds), None)


def _compare_across_ranks(
    name: str, call: str, problem: str | None, group: ProcessGroup | None, size: int
) -> None:
    answers: list[tuple[str, str | None]] = [("", None)] * size
    with paused():
        dist.all_gather_object(answers, (call, problem), group=group)
    if all(p is None for _, p in answers) and len({c for c, _ in answers}) == 1:
        return
    lines = [
        f"  rank {rank}: {c}" + (f" -> {p}" if p else "")
        for rank, (c, p) in enumerate(answers)
    ]
    raise ValueError(
        f"{name}: the ranks of this group do not make one and the same legal call:\n"
        + "\n".join(lines)
    )


def _describe_call(
    name: str,
    tensors: Sequence[Tensor],
    op: ReduceOp.RedOpType | None,
    compare: object,
) -> str:
    what = [
        str(list(tensors[0].shape)) if compare is None and tensors else str(compare)
    ]
    what += [str(t.dtype).removeprefix("torch.") for t in tensors[:1]]
    what += [_name(op)] if op is not None else []
    return f"{name}({', '.join(what)})"


def _describe(tensors: Sequence[Tensor]) -> str:
    return ", ".join(
        f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors
    )


def _name(op: object) -> str:
    return getattr(op, "name", str(op))
