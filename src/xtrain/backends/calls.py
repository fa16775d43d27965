"""A description of every call, which the ranks compare before they move data.

The k-th collective of each rank in a group belongs to the k-th of all others. Before it
touches data, the ranks compare fingerprints: operation, shapes, dtypes, reduce
operation, root. Ranks in different calls would otherwise add up bytes that do not
belong together, without an error.

The line that called is reported, not compared: `if rank == 0: ... else: ...` may hold
the same call twice. With XTRAIN_COMPARE_LINES=1 it is compared, too.

A program makes the same calls again and again, so what a fingerprint costs is paid once
for each of them. The text of a call is written only for an error.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.comm.reduce_op import COMBINE

# Modules between the line `dist.all_reduce(x)` and this backend. The last two wrap what
# torch calls deprecated: `reduce_scatter_tensor`, `all_gather_into_tensor`.
_BETWEEN = (
    "xtrain.backends.",
    "xtrain.cluster.",
    "torch.distributed.c10d_logger.",
    "torch.distributed.distributed_c10d.",
    "typing_extensions.",
    "warnings.",
)
_LIBRARIES = ("torch.", "xtrain.", "contextlib.")
PROGRAM, LIBRARY, BETWEEN = range(3)
LINE_BITS = 16  # of a fingerprint: the lowest ones tell the line


class Kinds(dict[str, int]):
    """What kind of code a module is, found once for each: every call asks for some."""

    def __missing__(self, module: str) -> int:
        name = f"{module}."  # so that "warnings_of_mine" is not part of "warnings"
        library = LIBRARY if name.startswith(_LIBRARIES) else PROGRAM
        self[module] = BETWEEN if name.startswith(_BETWEEN) else library
        return self[module]


KINDS = Kinds()


class CollectiveMismatch(Exception):
    """The ranks are in different calls."""


class CallRefused(RuntimeError):
    """A call that all its ranks refuse: nothing was moved, and their group is whole."""


class CallSite(NamedTuple):
    """A line of a program."""

    file: str
    line: int
    direct: bool
    """This line itself calls torch.distributed; no library stands between."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = CallSite("", 0, False)


def call_site() -> CallSite:
    """The innermost line outside torch and xtrain.

    And whether that line itself calls torch.distributed. A library may have its own
    reasons to call from two places at once: DDP's join, for ranks out of inputs.
    """
    frame: FrameType | None = sys._getframe(2)  # past this and a method of a group
    while frame is not None and KINDS[frame.f_globals.get("__name__", "")] == BETWEEN:
        frame = frame.f_back
    caller = frame
    while frame is not None and KINDS[frame.f_globals.get("__name__", "")] != PROGRAM:
        frame = frame.f_back
    if frame is None:
        return CallSite("?", 0, False)
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame is caller)


ShapeAndDtype = tuple[torch.Size, torch.dtype]


def shape_and_dtype(tensor: Tensor) -> ShapeAndDtype:
    """What all ranks' tensors must have in common."""
    return tensor.shape, tensor.dtype


class CollectiveCall(NamedTuple):
    """One call of a collective: what its ranks compare and what they are shown."""

    name: str
    detail: Any
    """A `ShapeAndDtype`, several, or a dtype; None for nothing."""
    op: ReduceOp.RedOpType | None
    root: int | None
    site: CallSite
    extra_text: Callable[[], str] | None = None
    """Written after the call when it is shown; not compared."""

    def __str__(self) -> str:
        extra = f" {self.extra_text()}" if self.extra_text else ""
        return f"{signature(*self[:4])}{extra} at {self.site}"


class PointToPointCall(NamedTuple):
    """One end of a message, in global ranks."""

    name: str
    tensor: Tensor
    key: str
    peer: int | list[int]
    site: CallSite

    def __str__(self) -> str:
        what = f"{shape_of(self.tensor)}, {self.key}={self.peer}"
        return f"{self.name}({what}) at {self.site}"


@lru_cache(maxsize=4096)
def fingerprint(
    name: str,
    detail: Any,
    op: ReduceOp.RedOpType | None,
    root: int | None,
    site: CallSite = NOWHERE,
    strict: bool = False,
) -> int:
    """64 bits, equal in every process: 48 of what must be equal, 16 of the line.

    With `strict` the line is one of the things that must be equal. Of the file only the
    name counts: other hosts may keep it in another folder.
    """
    line = "" if site is NOWHERE else os.path.basename(str(site))
    call = signature(name, detail, op, root)
    compared = digest(f"{call}\0{line}" if strict else call, 64 - LINE_BITS)
    return compared << LINE_BITS | digest(line, LINE_BITS)


def digest(text: str, bits: int) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=bits // 8).digest()
    )


def compare(checks: list[int]) -> list[int]:
    """The fingerprints; CollectiveMismatch if they differ in more than the line."""
    if len({check >> LINE_BITS for check in checks}) > 1:
        raise CollectiveMismatch
    return checks


def signature(
    name: str, detail: Any, op: ReduceOp.RedOpType | None, root: int | None
) -> str:
    """A call as all its ranks should see it: "all_reduce([8] float32, SUM)"."""
    parts = [] if detail is None else [in_words(detail)]
    parts += [op.name] if op is not None else []
    parts += [f"root={root}"] if root is not None else []
    return f"{name}({', '.join(parts)})"


def in_words(detail: Any) -> str:
    if not isinstance(detail, tuple):
        return str(detail)
    if isinstance(detail[0], torch.Size):
        shape, dtype = detail
        return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
    return str([in_words(each) for each in detail])


def shape_of(tensor: Tensor) -> str:
    return in_words(shape_and_dtype(tensor))


def shapes_of(tensors: Sequence[Tensor]) -> str:
    return str([shape_of(tensor) for tensor in tensors])


def reduce_op(opts: Any) -> ReduceOp.RedOpType:
    """The reduce operation of torch's options, a key of COMBINE."""
    op = opts.reduceOp if opts is not None else ReduceOp.SUM
    for known in COMBINE:
        if op == known:
            return known
    raise ValueError(f"reduce op {op} is not supported")
