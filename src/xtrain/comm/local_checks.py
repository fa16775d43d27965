"""The rules that one rank can check alone, before its first message leaves.

The same program on every rank breaks them on every rank, so all raise and none waits.
What one rank cannot see alone (rank 0 passes 4 elements, rank 1 passes 5) takes a
question to the others, and `xtrain.comm.debug_checks` asks it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.checks import Rule, group_or_world, rank_and_size, shape_of
from xtrain.comm.reduce_op import BITWISE, COMBINE, fold_into, op_name

MISSING: Any = object()  # None is what a caller may pass by mistake


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A collective call of this rank: what is asked of it, and compared between ranks.

    All tensors are of one dtype, on one device that the backend serves; `op` fits the
    dtype. `written` are the tensors that get a result: what is received, or the first
    one, unless given. `compare` is what must be the same on all ranks besides dtype and
    op: the first tensor's shape unless given. `sends` and `receives` are tensors by the
    rank at the other end, where ranks may differ: both ends must name the same shape.
    `other_group` is the second axis of a mesh.
    """

    name: str
    group: ProcessGroup | None
    tensors: Sequence[Tensor]
    rules: Sequence[Rule] = ()
    op: ReduceOp.RedOpType = MISSING
    compare: Sequence[object] | None = None
    written: Sequence[Tensor] | None = None
    sends: Mapping[int, Tensor] = field(default_factory=dict)
    receives: Mapping[int, Tensor] = field(default_factory=dict)
    other_group: ProcessGroup | None = None


def check_tensor(
    name: str,
    tensor: Tensor,
    group: ProcessGroup | None,
    contiguous: bool = False,
    written: bool = False,
) -> None:
    """ValueError for a tensor that cannot be sent, or received into."""
    problem = local_problem(
        CheckedCall(name, group, [tensor], written=[tensor] * written)
    )
    if problem is None and contiguous and not tensor.is_contiguous():
        problem = (
            f"needs a contiguous tensor, got shape {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}"
        )
    if problem is not None:
        raise ValueError(f"{name}: {problem}")


def check_messages(
    name: str,
    sends: list[tuple[Tensor, int]],
    recvs: list[tuple[Tensor, int]],
    group: ProcessGroup | None,
) -> None:
    """ValueError for messages (tensor, group rank) that cannot be posted together."""
    me, size = rank_and_size(group)
    for tensor, peer in (*recvs, *sends):
        check_tensor(name, tensor, group, contiguous=True)
        if not 0 <= peer < size:
            raise ValueError(f"{name}: group rank {peer} is not in 0..{size - 1}")
    own_sends = [list(t.shape) for t, peer in sends if peer == me]
    own_recvs = [list(t.shape) for t, peer in recvs if peer == me]
    if own_sends != own_recvs:
        raise ValueError(
            f"{name}: rank {me} sends {own_sends} to itself "
            f"and receives {own_recvs} from itself"
        )


def check_peer(
    name: str, rank: int | None, group_rank: int | None, group: ProcessGroup | None
) -> None:
    """ValueError unless one of both is given, and is in the group."""
    _, size = rank_and_size(group)
    if (rank is None) == (group_rank is None):
        raise ValueError(
            f"give exactly one of {name} (global rank) and group_{name}, "
            f"got {name}={rank}, group_{name}={group_rank}"
        )
    given = rank if group_rank is None else group_rank
    if not isinstance(given, int) or isinstance(given, bool):
        # ReduceOp.SUM == 0, so a misplaced op would pass for rank 0.
        prefix = "" if group_rank is None else "group_"
        raise ValueError(f"{prefix}{name}={given!r} is not a rank number")
    members = dist.get_process_group_ranks(group_or_world(group))
    if group_rank is None and rank not in members:
        raise ValueError(f"{name}={rank} is not in the group {members} (global ranks)")
    if group_rank is not None and not 0 <= group_rank < size:
        raise ValueError(f"group_{name}={group_rank} is not in 0..{size - 1}")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def local_problem(call: CheckedCall) -> str | None:
    """What this rank can see wrong with its call, or None; it must be a member."""
    rank_and_size(call.group)
    problem = _problem_of_tensors(call.tensors, call.group)
    if problem is None and call.op is not MISSING:
        problem = _problem_of_op(call.op, call.tensors[0])
    if problem is None:
        problem = next((message for holds, message in call.rules if not holds), None)
    if problem is None:
        problem = _overlap(_written(call))
    return problem


def _written(call: CheckedCall) -> Sequence[Tensor]:
    if call.written is not None:
        return call.written
    if call.sends or call.receives:
        return list(call.receives.values())
    return call.tensors[:1]


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
        fold_into(one, one.clone(), op)
    except RuntimeError:
        return False
    return True
