"""What lets a test run on ranks with a GPU as it does on a CPU.

A rank with a GPU makes its tensors there. A CPU's generator cannot draw there, so the
same numbers on every device are drawn on the CPU and moved.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Generator, Tensor

NCCL = ("nccl", "nccl-rules")
"""Backends with NCCL's rules: no tags, one queue for each pair of ranks."""


def randn(*shape: int, generator: Generator, dtype=torch.float64) -> Tensor:
    drawn = torch.randn(*shape, generator=generator, dtype=dtype, device="cpu")
    return drawn.to(torch.get_default_device())


def randint(high: int, shape: Sequence[int], generator: Generator) -> Tensor:
    drawn = torch.randint(high, tuple(shape), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def device_type() -> str:
    """Of this rank, for `torch.autocast`."""
    return torch.get_default_device().type


def on_cpu() -> bool:
    """Whether ids and labels are looked at before they are used: on a GPU a wrong one
    ends the rank's CUDA context, so that no further test could run on it."""
    return device_type() == "cpu"


def same_numbers(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """What matmuls in `dtype` gave: bit by bit on a CPU. A GPU picks a kernel, and with
    it an order of additions, by the shape and the alignment of what it is given."""
    if on_cpu():
        return torch.equal(found, expected)
    rounding = 4 * torch.finfo(dtype).eps
    return bool((found - expected).norm() <= rounding * expected.norm())


def skip_unless_mistakes_are_told(worlds) -> None:
    """For what is wrong on some ranks only: without it the others would wait."""
    if worlds.device != "cpu":
        pytest.skip("on a GPU no rank is told of another's mistake: its CPU would wait")


def skip_unless_on_a_gpu(worlds) -> None:
    """GPUs are hidden from pytest's own process, which forks: ranks alone see them."""
    if worlds.device != "cuda":
        pytest.skip("needs ranks on a GPU: --device cuda")
