"""What the tests of tensor parallelism share: random tensors, slices, comparisons."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.devices import randn
from xtrain.cluster.per_rank import replaced
from xtrain.comm import autograd
from xtrain.comm.collective_choice import DIRECT

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def random_of(seed: int, *shape: int, dtype=torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return randn(*shape, generator=generator).to(dtype)


def fill(module: nn.Module, seed: int = 1) -> nn.Module:
    """Every parameter random, the same on all ranks, in float64."""
    module = module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(random_of(100 * seed + number, *parameter.shape) / 3)
    return module


def mine(full: Tensor, dim: int, group=None) -> Tensor:
    """This rank's slice."""
    size = dist.get_world_size(group)
    return full.chunk(size, dim)[dist.get_rank(group)]


def close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, **CLOSE, msg=lambda m: f"{what}: {m}")


def sub_group(members):
    """Of these ranks; None on the others, which take no further part."""
    group = dist.new_group(members)
    return group if dist.get_rank() in members else None


ON_GROUPS = pytest.mark.parametrize(
    ("size", "members"), [(1, None), (2, None), (3, None), (4, None), (4, [1, 3])]
)
"""All ranks of a world, and a part of them."""


def on_group(members, case: Callable[..., None], *args) -> None:
    """Run `case(group, *args)` on these ranks; None for all."""
    group = sub_group(members) if members else None
    if members is None or group is not None:
        case(group, *args)


@contextmanager
def our_collectives() -> Iterator[None]:
    """Gathers and scatters of ours, as on gloo, to count their bytes: the ledger sees
    no bytes of those that torch leaves to NCCL."""
    with replaced(autograd, "default_collectives", lambda *_: DIRECT):
        yield
