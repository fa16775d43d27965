"""How each kind of collective is called, for a full tensor of any size.

    kind             function(...)            a rank gives       and gets
    all_reduce       (tensor)                 the whole          the whole, in place
    broadcast        (tensor, root)           the root's whole   the whole, in place
    reduce           (tensor, root)           the whole          on the root, in place
    reduce_scatter   (output, input)          the whole          its part
    all_gather       (output, input)          its part           the whole
    all_to_all       (output, input)          the whole          a part of each rank's
    gather           (input, outputs, root)   its part           all, on the root
    scatter          (output, inputs, root)   the root's whole   its part
    barrier          ()

As in `xtrain.plan`, a size is always the full tensor's. Runs, traces and races call
ours and torch's from this one table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

IN_PLACE = ("all_reduce", "broadcast", "reduce", "barrier")
OF_PARTS = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
KINDS = (*IN_PLACE, *OF_PARTS)


@dataclass(frozen=True)
class PreparedCall:
    """A collective with its arguments: what this rank gives, and where its result is.

    Both are one tensor where it works in place. Where only the root gets a result, the
    others have zeros there, or their scratch.
    """

    run: Callable[[], Any]
    given: Tensor
    result: Tensor


def prepare(
    kind: str, function: Callable[..., Any], whole: Tensor, root: int = 0
) -> PreparedCall:
    """`function` of this kind with its arguments, made from the whole tensor.

    Every rank brings a whole one of its own, one-dimensional: what it reduces, or has
    its part of. Where only the root's counts, the others have zeros.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {KINDS}")
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind in ("broadcast", "scatter") and rank != root:
        whole = whole.new_zeros(whole.shape)
    if kind == "barrier":
        return PreparedCall(function, whole, whole)
    if kind in IN_PLACE:
        arguments = (whole,) if kind == "all_reduce" else (whole, root)
        return PreparedCall(partial(function, *arguments), whole, whole)
    if len(whole) % size:
        raise ValueError(
            f"{kind} of {len(whole)} elements on {size} ranks: they must divide evenly"
        )
    part = whole.chunk(size)[rank].clone()
    if kind in ("all_gather", "all_to_all"):
        given = part if kind == "all_gather" else whole
        result = whole.new_zeros(whole.shape)
        return PreparedCall(partial(function, result, given), given, result)
    if kind == "reduce_scatter":
        return PreparedCall(partial(function, part.zero_(), whole), whole, part)
    if kind == "gather":
        result = whole.new_zeros(whole.shape)
        parts = list(result.chunk(size)) if rank == root else None
        return PreparedCall(partial(function, part, parts, root), part, result)
    parts = list(whole.chunk(size)) if rank == root else None
    return PreparedCall(partial(function, part.zero_(), parts, root), whole, part)


def kind_of(name: str) -> str:
    """The kind of a collective by its name: `ring_all_gather` is an `all_gather`."""
    kinds = [kind for kind in KINDS if kind in name]
    if not kinds:
        raise ValueError(f"{name!r} names none of {KINDS}")
    return max(kinds, key=len)
