"""Starts 4 ranks on this machine, compares, and counts what each of them sends."""

import copy
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
BOUNDS = {  # of the largest value
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 0.01,
    torch.bfloat16: 0.04,
}
FULL = {  # collective: which argument is the full tensor, how often it goes round
    "broadcast_": (0, 1),
    "allreduce_": (0, 2),
    "_allgather_base_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "alltoall_base_": (1, 1),
}
Group = dist.ProcessGroup | None


class Sent(TorchDispatchMode):
    """Counts what this rank sends in a `with` block; torch's collectives as a ring."""

    def __init__(self, group: Group = None):
        super().__init__()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.messages, self.nbytes = 0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.name().removeprefix("c10d::")
        if name == "send" or name in FULL:
            place, times = FULL.get(name, (0, 1))
            share = 1.0 if name == "send" else times * (self.size - 1) / self.size
            tensors = [args[place]] if torch.is_tensor(args[place]) else args[place]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            pieces = args[4] if "alltoall" in name else []  # if they are uneven
            own = sum(pieces) and pieces[self.rank] * nbytes / sum(pieces)
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


def in_both(module: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The module in `dtype`, its weights random and the same on all ranks, and one in
    float64 with these very weights."""
    with torch.no_grad():
        for number, weight in enumerate(module.parameters()):
            weight.copy_(randn(*weight.shape, seed=100 + number) / 3)
    low = module.to(dtype)
    return low, copy.deepcopy(low).double()


def gradient(tensor: Tensor) -> Tensor:
    """What backward has left; stop if it left nothing."""
    assert tensor.grad is not None
    return tensor.grad


def same(
    what: str,
    actual: Tensor,
    expected: Tensor,
    tolerance: float = 1e-5,
    group: Group = None,
) -> None:
    """Stop all ranks unless `actual` is `expected` on each of them."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    error = (actual - expected).abs().max().item()
    if not error <= tolerance:
        sys.exit(f"rank {dist.get_rank(group)}: WRONG by {error:.3g}: {what}")
    dist.barrier(group)  # every rank has compared
    say(f"right on every rank: {what}", group)


def near(
    what: str,
    actual: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    group: Group,
    least: float = 1e-6,
) -> None:
    """Stop all ranks unless `actual` is in `dtype`, and `exact` as far as that tells.

    `exact` is in float64, from the same inputs and weights; the bound is a share of its
    largest value, or of `least` if that is larger.
    """
    assert actual.dtype == dtype, what
    tolerance = BOUNDS[dtype] * max(least, exact.abs().max().item())
    same(what, actual.double(), exact, tolerance, group)


def sends(sent: Sent, formula: str, nbytes: float, group: Group = None) -> None:
    """Say what every rank sent and what the formula gives for it; stop if unequal.

    `nbytes` is this rank's value of the formula.
    """
    mine = torch.tensor([sent.messages, sent.nbytes, nbytes], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(sent.size)]
    dist.all_gather(everyone, mine, group)
    for rank, (messages, counted, given) in enumerate(torch.stack(everyone).tolist()):
        line = f"rank {rank}: {messages:.0f} messages, {counted:,.0f} bytes sent; "
        say(line + f"{formula}: {given:,.0f}", group)
        if abs(counted - given) > 1e-6:  # thirds of a tensor are no whole bytes
            sys.exit(f"rank {rank}: WRONG: {formula}: {given:,.0f} bytes")


def say(line: str, group: Group = None) -> None:
    """Print once, not on every rank."""
    if dist.get_rank(group) == 0:
        print(line, flush=True)


def one_rank(rank: int, check: Callable[[], None], store: str) -> None:
    """Join the other ranks through the file `store`, then compare."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    check()
    dist.destroy_process_group()


def run(check: Callable[[], None]) -> None:
    """Start the ranks; exit status 1 if one of them fails."""
    start = "fork" if sys.platform == "linux" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                one_rank, (check, f"{folder}/store"), RANKS, start_method=start
            )
        except mp.ProcessExitedException:
            sys.exit(1)  # the rank itself has said why
