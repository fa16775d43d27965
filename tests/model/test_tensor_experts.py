"""Experts cut over tensor ranks, along the sequence or not, against the whole layer."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm import init_mesh
from xtrain.expert_parallel import MoE
from xtrain.model.moe import TensorGShardMoE, TensorMoE

SIZES = {"hidden_size": 5, "intermediate_size": 12, "num_experts": 6, "top_k": 2}
SHARED = {"shared_intermediate_size": 24}
DEEPSEEK = SHARED | {
    "score": "sigmoid",
    "scale": 2.5,
    "groups": 3,
    "top_groups": 2,
    "balance_bias": True,
}
ROWS = 3
CUT = {"gate_proj": -2, "up_proj": -2, "down_proj": -1}
"""The inner size, of stacked experts and of the shared one."""


class Case(NamedTuple):
    expert: int
    tensor: int
    options: dict[str, Any]
    padded: bool = False
    once: bool = False

    def share(self, name: str, full: Tensor, expert: int, tensor: int) -> Tensor:
        """What these ranks hold of a weight, a gradient or a buffer."""
        if name.startswith("experts."):
            full = full.chunk(self.expert)[expert]
        return part(full, CUT.get(name.split(".")[1]), tensor, self.tensor)


def part(full: Tensor, dim: int | None, index: int, count: int) -> Tensor:
    """One of so many slices; the whole of what has no such dim."""
    return full if dim is None else full.chunk(count, dim)[index]


def score(moe: MoE, y: Tensor, weight: Tensor) -> Tensor:
    """A loss of outputs and of the routing, each with gradients of their own."""
    assert moe.router.stats is not None
    stats = moe.router.stats
    return (y * weight).sum() + 3 * stats.load_balancing_loss + 0.5 * stats.z_loss


def batch_of(case: Case, expert: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """x, its weights in the loss, and a mask, of one expert rank's own rows."""
    generator = torch.Generator().manual_seed(expert)
    shape = ROWS, 5 * case.tensor, SIZES["hidden_size"]
    drawn = torch.randn(2, *shape, generator=generator, dtype=dtype, device="cpu")
    kept = torch.rand(shape[:2], generator=generator, device="cpu") < 0.7
    x, weight = drawn.to(torch.get_default_device())
    return x, weight, kept.to(x.device) if case.padded else None


def cut_of(case: Case, mesh: DeviceMesh, whole: MoE, **options: Any) -> MoE:
    """This rank's share of the layer."""
    options |= {"tensor": mesh["tensor"].get_group()}
    if case.expert > 1:
        options |= {"group": mesh["expert"].get_group(), "once_a_rank": case.once}
    kind = TensorGShardMoE if case.expert > 1 else TensorMoE
    layer = kind(**SIZES, **case.options, **options)
    full = whole.state_dict().items()
    where = mesh.get_local_rank("expert"), mesh.get_local_rank("tensor")
    layer.load_state_dict({n: case.share(n, t, *where) for n, t in full})
    return layer


def train_both(cases: list[Case], dtype: torch.dtype, sequence: bool) -> None:
    for case in cases:
        mesh = init_mesh((case.expert, case.tensor), ("expert", "tensor"))
        here, place = (mesh.get_local_rank(axis) for axis in ("expert", "tensor"))
        torch.manual_seed(7)
        whole = MoE(**SIZES, **case.options, dtype=dtype)
        if whole.router.balance_bias is not None:
            whole.router.balance_bias.normal_()
        cut = cut_of(case, mesh, whole, sequence_parallel=sequence, dtype=dtype)
        dim = 1 if sequence else None
        mine = partial(part, dim=dim, index=place, count=case.tensor)
        x, weight, mask = batch_of(case, here, dtype)
        own_x = mine(x).clone().requires_grad_()
        y = cut(own_x, mask)
        score(cut, y, mine(weight)).backward()
        x.requires_grad_()
        right = whole(x, mask)
        score(whole, right, weight).backward()
        close(y, mine(right), case, "y")
        close(own_x.grad, mine(x.grad), case, "x")
        for rank in {*range(case.expert)} - {here}:  # an expert sees all their tokens
            x, weight, mask = batch_of(case, rank, dtype)
            for name, parameter in whole.named_parameters():
                parameter.requires_grad_("experts." in name)
            score(whole, whole(x, mask), weight).backward()
        for name, parameter in cut.named_parameters():
            grad = whole.get_parameter(name).grad
            assert grad is not None
            close(parameter.grad, case.share(name, grad, here, place), case, name)


def close(found: Any, expected: Tensor, case: Case, what: str) -> None:
    near = 1e-11 if expected.dtype == torch.float64 else 0.03
    error = (found - expected).abs().max()
    assert error <= near * expected.abs().max(), f"{case} {what}: {error}"


def cases_of(size: int) -> list[Case]:
    found = [
        Case(1, size, {}),
        Case(1, size, DEEPSEEK, padded=True),
        Case(1, size, SHARED | {"capacity_factor": 0.7}),
    ]
    if size == 4:
        found += [
            Case(2, 2, DEEPSEEK, padded=True),
            Case(2, 2, SHARED | {"capacity_factor": 0.7}),
            Case(2, 2, SHARED, once=True),
        ]
    return found


@pytest.mark.verifies(
    "xtrain.model.moe:TensorMoE", "xtrain.model.moe:_IdentityReduceScatter"
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_along_the_sequence_it_is_the_whole_layer(world, size, dtype):
    """Outputs and every gradient, of a loss that has the routers' own, too."""
    world(size).run(train_both, cases_of(size), dtype, True)


@pytest.mark.verifies("xtrain.model.moe:TensorMoE")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_with_whole_sequences_it_is_the_whole_layer(world, size):
    world(size).run(train_both, cases_of(size), torch.float64, False)
