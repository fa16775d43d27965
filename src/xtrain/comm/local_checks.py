"""Refuse a bad call before its first message leaves.

Every collective of `xtrain.comm` begins with `check_call`. Its rules are local: the
same program on every rank breaks them on every rank, so all raise and nobody waits.
What one rank cannot see alone (rank 0 passes 4 elements, rank 1 passes 5) takes a
question to the others, and `xtrain.comm.debug_checks` asks it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.reduce_op import BITWISE, COMBINE, combine, op_name

MISSING: Any = object()  # None is what a caller may pass by mistake
Rule = tuple[bool, str]  # whether it holds, and what to say if not


@dataclass(frozen=True, slots=True)
class Call:
    """A collective call of this rank, as the ranks compare it.

    `compare` is what must be the same on all besides dtype and op: the first tensor's
    shape unless given. `sends` and `receives` are tensors by the rank at the other end,
    where ranks may differ: both ends must name the same shape.
    """

    name: str
    tensors: Sequence[Tensor]
    op: ReduceOp.RedOpType = MISSING
    compare: Sequence[object] | None = None
    sends: Mapping[int, Tensor] = field(default_factory=dict)
    receives: Mapping[int, Tensor] = field(default_factory=dict)


# (call, what is wrong with it here, its groups): raises on all ranks or on none.
# The list is empty unless `debug_checks` is on.
Comparison = Callable[[Call, str | None, Sequence[ProcessGroup | None]], None]
COMPARISONS: list[Comparison] = []


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
    op: ReduceOp.RedOpType = MISSING,
    compare: Sequence[object] | None = None,
    rules: Sequence[Rule] = (),
    written: Sequence[Tensor] | None = None,
) -> tuple[int, int]:
    """Check one collective call and return `rank_and_size(group)`.

    Args:
        tensors: all the call's tensors: one dtype, one device the backend serves.
        op: the reduce operation, checked against the dtype.
        compare: see `Call`.
        rules: pairs (holds, message) of further conditions.
        written: the tensors that get a result; the first one unless given.
    """
    rank, size = rank_and_size(group)
    problem = local_problem(group, tensors, op, rules, written)
    conclude(Call(name, tensors, op, compare), problem, group)
    return rank, size


def check_ends(
    name: str,
    group: ProcessGroup | None,
    *tensors: Tensor,
    sends: Mapping[int, Tensor],
    receives: Mapping[int, Tensor],
    compare: Sequence[object] = (),
    rules: Sequence[Rule] = (),
) -> tuple[int, int]:
    """`check_call` where ranks may have different shapes; `receives` are written."""
    rank, size = rank_and_size(group)
    written = list(receives.values())
    problem = local_problem(group, tensors, MISSING, rules, written)
    call = Call(name, tensors, MISSING, compare, sends, receives)
    conclude(call, problem, group)
    return rank, size


def check_p2p(
    name: str,
    tensor: Tensor,
    group: ProcessGroup | None,
    contiguous: bool = False,
    written: bool = False,
) -> None:
    """Check the tensor of one send or receive."""
    problem = local_problem(group, (tensor,), written=(tensor,) * written)
    if problem is None and contiguous and not tensor.is_contiguous():
        problem = (
            f"needs a contiguous tensor, got shape {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}"
        )
    if problem is not None:
        raise ValueError(f"{name}: {problem}")


def refuse(name: str, group: ProcessGroup | None, problem: str) -> NoReturn:
    """Raise ValueError for a collective call; under `debug_checks` on every rank."""
    check_call(name, group, rules=[(False, problem)])
    raise AssertionError("unreachable: the rule above does not hold")


def conclude(call: Call, problem: str | None, *groups: ProcessGroup | None) -> None:
    """Raise ValueError for a problem of this rank; under `debug_checks` of any rank."""
    for compare in COMPARISONS:
        compare(call, problem, groups)
    if problem is not None:
        raise ValueError(f"{call.name}: {problem}")


def holds_all(whole: Tensor, part: Tensor, group: ProcessGroup | None) -> Rule:
    """A rule: `whole` has as many elements as the `part`s of all ranks."""
    _, size = rank_and_size(group)
    message = f"{shape_of(whole)} must hold {size} times {shape_of(part)}"
    both = isinstance(whole, Tensor) and isinstance(part, Tensor)
    return both and whole.numel() == size * part.numel(), message


def are_contiguous(*tensors: Tensor) -> Rule:
    """A rule: no gaps in memory, the last dimension runs fastest."""
    holds = all(isinstance(t, Tensor) and t.is_contiguous() for t in tensors)
    return holds, "needs contiguous tensors"


def shape_of(tensor: object) -> object:
    """For what is compared and told before it is known to be a tensor."""
    return list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def local_problem(
    group: ProcessGroup | None,
    tensors: Sequence[Any],
    op: ReduceOp.RedOpType = MISSING,
    rules: Sequence[Rule] = (),
    written: Sequence[Tensor] | None = None,
) -> str | None:
    """What this rank can see wrong with its call, or None."""
    problem = _problem_of_tensors(tensors, group)
    if problem is None and op is not MISSING:
        problem = _problem_of_op(op, tensors[0])
    if problem is None:
        problem = next((message for holds, message in rules if not holds), None)
    if problem is None:
        problem = _overlap(tensors[:1] if written is None else written)
    return problem


def _problem_of_tensors(
    tensors: Sequence[Any], group: ProcessGroup | None
) -> str | None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return f"expected a tensor, got {type(tensor).__name__}"
    if not tensors:
        return None
    if len({t.dtype for t in tensors}) > 1:
        what = ", ".join(f"{shape_of(t)} {dtype_name(t)}" for t in tensors)
        return f"all tensors must have one dtype, got {what}"
    if len({t.device for t in tensors}) > 1:
        devices = [str(t.device) for t in tensors]
        return f"all tensors must be on one device, got {devices}"
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
    return None


def _problem_of_op(op: ReduceOp.RedOpType, tensor: Tensor) -> str | None:
    dtype = tensor.dtype
    if not isinstance(op, ReduceOp.RedOpType) or op not in COMBINE:
        return f"reduce op {op_name(op)} is not one of {[op_name(o) for o in COMBINE]}"
    if op == ReduceOp.AVG and not dtype.is_floating_point:
        return f"AVG needs a floating-point tensor, got {dtype}"
    if op in BITWISE and dtype.is_floating_point:
        return f"{op_name(op)} needs an integer tensor, got {dtype}"
    if not _can_combine(op, dtype, tensor.device.type):
        return f"torch cannot compute {op_name(op)} of {dtype} here"
    return None


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
