"""Compare every rank's call before it runs.

`local_checks` refuses what one rank can see alone. That rank 0 passes 4 elements and
rank 1 passes 5 takes a question to the others, asked before every call while
`debug_checks()` is on, at the price of one small exchange:

    with debug_checks():              # or the environment variable XTRAIN_DEBUG=1
        ring_all_reduce(tensor)       # ValueError on every rank, with every rank's call
"""

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import describe
from xtrain.comm.call_agreement import check_same_on, uncounted
from xtrain.comm.checks import group_or_world
from xtrain.comm.local_checks import MISSING, CheckedCall, dtype_name
from xtrain.comm.reduce_op import op_name

_on = os.environ.get("XTRAIN_DEBUG", "0") not in ("", "0")
_comparing: ContextVar[bool] = ContextVar("comparing", default=_on)


def comparing() -> bool:
    """Whether `debug_checks` are on for this rank."""
    return _comparing.get()


@contextmanager
def debug_checks(enabled: bool = True) -> Iterator[None]:
    """Compare every call of an `xtrain.comm` collective across ranks before it runs."""
    before = _comparing.set(enabled)
    try:
        yield
    finally:
        _comparing.reset(before)


def check_same_values(
    what: str, groups: Sequence[ProcessGroup], tensors: Mapping[str, Tensor | None]
) -> None:
    """Under `debug_checks`, ValueError on every rank of these axes unless all have the
    same elements; else no question is asked."""
    if comparing():
        check_same_on(what, groups, {n: contents(t) for n, t in tensors.items()})


def contents(tensor: Tensor | None) -> str:
    """Words that differ if the elements do."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{describe(tensor)}, checksum {zlib.crc32(flat.numpy().data):08x}"


@dataclass(slots=True)
class Report:
    """One rank's call as the others see it; shapes are keyed by group rank."""

    global_rank: int
    what: str
    problem: str | None
    sends: dict[int, list[int]] = field(default_factory=dict)
    receives: dict[int, list[int]] = field(default_factory=dict)


def compare_across_ranks(call: CheckedCall, problem: str | None) -> None:
    """ValueError on every rank unless all make the same call and none has a problem.

    Over two groups, the axes of a mesh, every rank of the mesh gets every report.
    """
    reports = [report_of(call, problem)]
    axes = [call.group] + [call.other_group] * (call.other_group is not None)
    for group in axes:
        size = group_or_world(group).size()
        gathered: list[list[Report]] = [[] for _ in range(size)]
        if size > 1:
            with uncounted():
                dist.all_gather_object(gathered, reports, group=group)
            reports = [report for part in gathered for report in part]
    same = len({report.what for report in reports}) == 1
    faults = differing_ends(reports)
    if same and not faults and all(report.problem is None for report in reports):
        return
    lines = [
        f"rank {r.global_rank}: {r.what}" + (f" -> {r.problem}" if r.problem else "")
        for r in reports
    ]
    raise ValueError(
        f"{call.name}: the ranks of this group do not make one and the same legal call:"
        + "".join(f"\n  {line}" for line in lines + (faults if same else []))
    )


def report_of(call: CheckedCall, problem: str | None) -> Report:
    """This rank's report; of a call with a problem it holds the problem alone."""
    if problem is not None:
        return Report(dist.get_rank(), call.name, problem)
    compare = call.compare
    if compare is None:
        compare = [list(t.shape) for t in call.tensors[:1]]
    what = [str(part) for part in compare]
    what += [dtype_name(t) + " on meta" * t.is_meta for t in call.tensors[:1]]
    what += [op_name(call.op)] if call.op is not MISSING else []
    return Report(
        dist.get_rank(),
        f"{call.name}({', '.join(what)})",
        None,
        {peer: list(t.shape) for peer, t in call.sends.items()},
        {peer: list(t.shape) for peer, t in call.receives.items()},
    )


def differing_ends(reports: list[Report]) -> list[str]:
    """Messages of which the two ends do not name the same shape."""
    return [
        f"rank {reports[src].global_rank} sends {shape} to rank {other.global_rank}, "
        f"which expects {other.receives.get(src)}"
        for dst, other in enumerate(reports)
        for src, shape in enumerate(report.sends.get(dst) for report in reports)
        if shape != other.receives.get(src)
    ]
