"""Runs a check on 4 ranks of this machine, and again in a group of two of them.

A check takes the form, and the rank and size of the group that it runs in; it compares
with an independent answer and counts what each rank sends. The form has been told the
group; what is compared here stays in it, too.
"""

import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RANKS, PAIR = 4, (1, 3)
WIDER = {torch.float32: 1e7, torch.bfloat16: 4e10}  # tolerances of other dtypes
Check = Callable[[Any, int, int], None]
SENDS = {  # operation: which argument is the full tensor, how often a ring sends it
    "send": (0, 0),
    "broadcast_": (0, 1),
    "allreduce_": (0, 2),
    "_allgather_base_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "alltoall_base_": (1, 1),
}
GROUP: ContextVar[Any] = ContextVar("group", default=None)  # of a check; None: all


class Sent(TorchDispatchMode):
    """Counts what this rank sends in a `with` block; torch's collectives as a ring."""

    messages, nbytes = 0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.name().removeprefix("c10d::")
        if name in SENDS:
            place, times = SENDS[name]
            size = dist.get_world_size(GROUP.get())
            share = times * (size - 1) / size if times else 1
            tensors = [args[place]] if torch.is_tensor(args[place]) else args[place]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            pieces = args[4] if "alltoall" in name else []  # if they are uneven
            me = dist.get_rank(GROUP.get())
            own = sum(pieces) and pieces[me] * nbytes / sum(pieces)
            self.messages += 1
            self.nbytes += nbytes - own if sum(pieces) else share * nbytes
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch loads its compiler


def global_ranks() -> list[int]:
    """The ranks of the group, as all ranks of the job are numbered."""
    return dist.get_process_group_ranks(GROUP.get() or dist.group.WORLD)


def randn(*shape: int, seed: int) -> Tensor:
    """Numbers that every rank can make, so that each knows what the others bring.

    Two groups side by side have other numbers.
    """
    generator = torch.Generator().manual_seed(seed + 1000 * global_ranks()[0])
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), torch.get_default_dtype())


def gradient(tensor: Tensor) -> Tensor:
    """What backward has left; stop if it left nothing."""
    assert tensor.grad is not None
    return tensor.grad


def same(what: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Stop all ranks unless `actual` is `expected` on each of them.

    `tolerance` is for float64 and relative to the largest number, if that is above 1.
    """
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    largest = expected.abs().max().item() if expected.numel() else 0.0
    allowed = tolerance * WIDER.get(actual.dtype, 1) * max(1.0, largest)
    error = (actual - expected).abs().max().item() if actual.numel() else 0.0
    if not error <= allowed:
        sys.exit(f"rank {dist.get_rank(GROUP.get())}: WRONG by {error:.3g}: {what}")
    dist.barrier(GROUP.get())  # every rank has compared
    say(f"right on every rank: {what}")


def sends(sent: Sent, formula: str, nbytes: float) -> None:
    """Say what every rank sent and what the formula gives for it; stop if unequal.

    `nbytes` is this rank's value of the formula.
    """
    mine = torch.tensor([sent.messages, sent.nbytes, nbytes], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in global_ranks()]
    dist.all_gather(everyone, mine, GROUP.get())
    for rank, (messages, counted, given) in enumerate(torch.stack(everyone).tolist()):
        line = f"rank {rank}: {messages:.0f} messages, {counted:,.0f} bytes sent; "
        say(line + f"{formula}: {given:,.0f}")
        if abs(counted - given) > 0.01:
            sys.exit(f"rank {rank}: WRONG: {formula}: {given:,.0f} bytes")


def computes() -> None:
    """Work that takes time, during which messages travel; only a virtual clock asks."""


def say(line: str) -> None:
    """Print once, not on every rank."""
    if dist.get_rank(GROUP.get()) == 0:
        print(line, flush=True)


def in_group(check: Check, form: Any, group: dist.ProcessGroup | None) -> None:
    """Run a check in a group that this rank belongs to; None is all ranks."""
    names = [n for n in inspect.signature(form).parameters if n.endswith("group")]
    token = GROUP.set(group)
    told = partial(form, **{names[-1]: group}) if group else form
    check(told, dist.get_rank(group), dist.get_world_size(group))
    GROUP.reset(token)


def takes_group(form: Any) -> bool:
    """Has the form one group, which may be a part of the ranks?"""
    names = [n for n in inspect.signature(form).parameters if n.endswith("group")]
    return len(names) == 1


def one_rank(rank: int, check: Check, form: Any, store: str) -> None:
    """Join the other ranks through the file `store`, then compare."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    in_group(check, form, None)
    if takes_group(form):
        say(f"in the group of ranks {PAIR[0]} and {PAIR[1]}:")
        pair = dist.new_group(list(PAIR))
        if rank in PAIR:
            in_group(check, form, pair)
    dist.destroy_process_group()


def run(check: Check, form: Any) -> None:
    """Start the ranks; exit status 1 if one of them fails."""
    start = "fork" if sys.platform == "linux" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                one_rank, (check, form, f"{folder}/store"), RANKS, start_method=start
            )
        except mp.ProcessExitedException:  # the rank itself has said why
            sys.exit(1)
