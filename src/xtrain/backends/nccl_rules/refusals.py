"""What NCCL refuses by looking at one rank's call."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.backends.calls import shape_of, shapes_of
from xtrain.backends.nccl_rules.rules import broken
from xtrain.comm.reduce_op import BITWISE, op_name

DTYPES = frozenset((
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
))  # fmt: skip


def check_tensors(name: str, tensors: Sequence[Tensor], collective: bool) -> None:
    """NcclRuleError unless NCCL moves these tensors."""
    for tensor in tensors:
        if tensor.is_complex():
            raise broken("complex", name, f"got {shape_of(tensor)}")
        if tensor.dtype not in DTYPES:
            raise broken("dtype", name, f"got {shape_of(tensor)}")
        if collective and not tensor.is_contiguous():
            values = f"got {shape_of(tensor)} with strides {tensor.stride()}"
            raise broken("contiguous", name, values)
        if torch._debug_has_internal_overlap(tensor) != 0:
            values = f"got {shape_of(tensor)} with strides {tensor.stride()}"
            raise broken("dense", name, values)


def check_reduction(name: str, op: object, tensor: Tensor) -> None:
    """NcclRuleError for a reduction that torch's NCCL refuses."""
    if op in BITWISE:
        raise broken("bitwise", name, f"got ReduceOp.{op_name(op)}")
    if op == ReduceOp.AVG and tensor.dtype == torch.bool:
        raise broken("bool average", name, f"got ReduceOp.AVG of {shape_of(tensor)}")


def check_equal_parts(name: str, tensors: Sequence[Tensor]) -> None:
    """NcclRuleError unless all parts have one shape and dtype."""
    if len({shape_of(tensor) for tensor in tensors}) > 1:
        raise broken("equal parts", name, f"got {shapes_of(tensors)}")
