"""Starts 4 ranks on this machine, compares, and counts what each of them sends."""

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 4
RING = (RANKS - 1) / RANKS
SENDS = {  # operation: which argument is the full tensor, how much of it a rank sends
    "send": (0, 1),
    "broadcast_": (0, RING),
    "allreduce_": (0, 2 * RING),
    "_allgather_base_": (0, RING),
    "_reduce_scatter_base_": (1, RING),
    "alltoall_base_": (1, RING),
}


class Sent(TorchDispatchMode):
    """Counts what this rank sends in a `with` block; torch's collectives as a ring."""

    messages, nbytes = 0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        place, share = SENDS.get(func.name().removeprefix("c10d::"), (0, 0))
        if share:
            tensors = [args[place]] if torch.is_tensor(args[place]) else args[place]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            pieces = args[4] if "alltoall" in func.name() else []  # if they are uneven
            own = sum(pieces) and pieces[dist.get_rank()] * nbytes / sum(pieces)
            self.messages += 1
            self.nbytes += nbytes - own if sum(pieces) else share * nbytes
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch loads its compiler


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that every rank can make, so that each knows what the others bring."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def gradient(tensor: Tensor) -> Tensor:
    """What backward has left; stop if it left nothing."""
    assert tensor.grad is not None
    return tensor.grad


def same(what: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Stop all ranks unless `actual` is `expected` on each of them."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    error = (actual - expected).abs().max().item()
    if not error <= tolerance:
        sys.exit(f"rank {dist.get_rank()}: WRONG by {error:.3g}: {what}")
    dist.barrier()  # every rank has compared
    say(f"right on every rank: {what}")


def sends(sent: Sent, formula: str, nbytes: float) -> None:
    """Say what every rank sent and what the formula gives for it; stop if unequal.

    `nbytes` is this rank's value of the formula.
    """
    mine = torch.tensor([sent.messages, sent.nbytes, nbytes], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(everyone, mine)
    for rank, (messages, counted, given) in enumerate(torch.stack(everyone).tolist()):
        line = f"rank {rank}: {messages:.0f} messages, {counted:,.0f} bytes sent; "
        say(line + f"{formula}: {given:,.0f}")
        if counted != given:
            sys.exit(f"rank {rank}: WRONG: {formula}: {given:,.0f} bytes")


def say(line: str) -> None:
    """Print once, not on every rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def one_rank(rank: int, check: Callable[[int, int], None], store: str) -> None:
    """Join the other ranks through the file `store`, then compare."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    check(rank, RANKS)
    dist.destroy_process_group()


def run(check: Callable[[int, int], None]) -> None:
    """Start the ranks; exit status 1 if one of them fails."""
    start = "fork" if sys.platform == "linux" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                one_rank, (check, f"{folder}/store"), RANKS, start_method=start
            )
        except mp.ProcessExitedException:
            sys.exit(1)  # the rank itself has said why
