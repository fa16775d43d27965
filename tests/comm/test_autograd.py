"""Differentiable collectives: values, gradients, duals, second derivatives."""

import pytest
import torch
import torch.distributed as dist

from xtrain.comm import CommLedger
from xtrain.comm.autograd import (
    all_gather_reduce_scatter,
    all_gather_split,
    all_reduce_identity,
    identity_all_reduce,
    reduce_scatter_all_gather,
    split_all_gather,
)

SYMBOLS = [
    f"xtrain.comm.autograd:{name}"
    for name in (
        "identity_all_reduce",
        "all_reduce_identity",
        "split_all_gather",
        "all_gather_split",
        "all_gather_reduce_scatter",
        "reduce_scatter_all_gather",
    )
]
CLASSES = [
    f"xtrain.comm.autograd:_{name}"
    for name in (
        "IdentityAllReduce",
        "AllReduceIdentity",
        "AllGatherReduceScatter",
        "ReduceScatterAllGather",
    )
]


def random_of(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    drawn = torch.randn(*shape, dtype=torch.float64, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def sub_group(members):
    """Of these ranks; None on the others, which take no further part."""
    group = dist.new_group(members)
    return group if dist.get_rank() in members else None


def values_and_gradients(members=None) -> None:
    """Each function against sums and slices of what all ranks hold."""
    group = sub_group(members) if members else None
    if members and group is None:
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for dim, shape in ((0, (2, 3, 5)), (1, (2, 3, 5)), (-1, (1, 2, 3))):
        whole = list(shape)
        whole[dim] *= size

        def mine(x, dim=dim):
            return x.chunk(size, dim)[rank]

        def check(function, x, expected, grad, expected_grad):
            x = x.clone().requires_grad_()
            before, grad_before = x.detach().clone(), grad.clone()
            y = function(x)
            torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
            y.backward(grad)
            torch.testing.assert_close(x.grad, expected_grad, rtol=1e-14, atol=1e-14)
            assert torch.equal(x.detach(), before), "the input was written"
            assert torch.equal(grad, grad_before), "the gradient was written"

        wholes = [random_of(r, *whole) for r in range(size)]
        parts = [random_of(50 + r, *shape) for r in range(size)]
        total, joined = sum(wholes), torch.cat(parts, dim)
        equal, slices = random_of(99, *whole), random_of(98, *whole).chunk(size, dim)
        here = wholes[rank]
        check(lambda x: identity_all_reduce(x, group), equal, equal, here, total)
        check(lambda x: all_reduce_identity(x, group), here, total, equal, equal)
        check(
            lambda x, d=dim: split_all_gather(x, d, group),
            equal, mine(equal), slices[rank], torch.cat(slices, dim),
        )  # fmt: skip
        check(
            lambda x, d=dim: all_gather_split(x, d, group),
            parts[rank], joined, equal, mine(equal),
        )  # fmt: skip
        check(
            lambda x, d=dim: all_gather_reduce_scatter(x, d, group),
            parts[rank], joined, here, mine(total),
        )  # fmt: skip
        check(
            lambda x, d=dim: reduce_scatter_all_gather(x, d, group),
            here, mine(total), slices[rank], torch.cat(slices, dim),
        )  # fmt: skip


@pytest.mark.verifies(*SYMBOLS, *CLASSES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_values_and_gradients_are_sums_and_slices(world, size):
    world(size).run(values_and_gradients)


@pytest.mark.verifies(*SYMBOLS)
def test_a_sub_group_keeps_to_itself(world):
    world(4).run(values_and_gradients, [1, 3])


def second_derivatives() -> None:
    """gradcheck perturbs one rank's inputs at a time, so all must perturb alike.

    The function of one replicated x that all ranks compute is checked: split, square,
    and come back.
    """
    size = dist.get_world_size()
    x = random_of(7, 2, size).requires_grad_()
    weight = random_of(dist.get_rank(), 2, 1)

    def by_columns(x):
        part = split_all_gather(x, 1)
        return all_gather_split(weight.mean() * 0 + part**3, 1)

    def by_sums(x):
        return all_reduce_identity(identity_all_reduce(x) ** 3 * weight)

    def by_sequence(x):
        local = split_all_gather(x, 1)
        whole = all_gather_reduce_scatter(local, 1)
        return all_gather_split(reduce_scatter_all_gather(whole**3 * weight, 1), 1)

    for function in (by_columns, by_sums, by_sequence):
        assert torch.autograd.gradcheck(function, x, nondet_tol=1e-12)
        assert torch.autograd.gradgradcheck(function, x, nondet_tol=1e-12)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_first_and_second_derivatives_are_those_of_finite_differences(world, size):
    world(size).run(second_derivatives)


def a_residual_sees_the_gradient_twice() -> None:
    """f(z) + z: an all-reduce into grad_output itself would give 2 N, not N + 1."""
    size = dist.get_world_size()
    z = torch.ones(3, requires_grad=True)
    (identity_all_reduce(z) + z).sum().backward()
    assert z.grad.tolist() == [size + 1.0] * 3
    z = torch.ones(3, requires_grad=True)
    leaf = z * 1
    total = all_reduce_identity(leaf)
    assert leaf.tolist() == [1.0] * 3 and total.tolist() == [float(size)] * 3


@pytest.mark.verifies(*SYMBOLS[:2])
def test_a_residual_around_f_gets_its_own_gradient(world):
    world(3).run(a_residual_sees_the_gradient_twice)


def bytes_sent() -> list[int]:
    sent = []
    for function in (
        lambda x: all_gather_reduce_scatter(x, 0),
        lambda x: reduce_scatter_all_gather(x, 0),
        lambda x: split_all_gather(x, 0),
        lambda x: all_gather_split(x, 0),
    ):
        x = torch.ones(12, 5, dtype=torch.float64, requires_grad=True)
        with CommLedger() as ledger:
            y = function(x)
        forward = ledger.bytes_sent
        with CommLedger() as ledger:
            y.sum().backward()
        sent.append((forward, ledger.bytes_sent))
    return sent


@pytest.mark.verifies(*SYMBOLS[2:])
def test_each_sends_what_its_collectives_do(world):
    if world(2).backend == "xtrain-shm":
        pytest.skip("its ranks read one another's memory, so they send less")
    if world(2).backend not in ("gloo", "xtrain-socket"):
        pytest.skip("a ledger counts messages; this backend's collectives send none")
    piece = 12 * 5 * 8  # all of the gathered slice, or of the tensor that is cut
    for size in (2, 3, 4):
        others = size - 1
        expected = [
            (others * piece, others * piece),
            (others * piece // size, others * piece // size),
            (0, others * piece // size),
            (others * piece, 0),
        ]
        for sent in world(size).run(bytes_sent):
            assert sent == expected


def refusals() -> None:
    size = dist.get_world_size()
    uneven = torch.ones(size * 2 + 1, 3)
    for function in (split_all_gather, reduce_scatter_all_gather):
        with pytest.raises(ValueError, match=f"{size * 2 + 1} is not divisible by"):
            function(uneven, 0)
    with pytest.raises(ValueError, match="dim=2, but the tensor is"):
        all_gather_split(uneven, 2)


@pytest.mark.verifies(*SYMBOLS[2:4], SYMBOLS[5])
def test_what_cannot_be_cut_is_refused_on_all_ranks(world):
    world(2).run(refusals)


def plain_collective_cuts_the_graph() -> None:
    """What these functions are for: torch's collective stops the gradient silently."""
    weight = torch.ones(2, requires_grad=True)
    x = weight * 3
    gathered = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    assert not torch.cat(gathered).requires_grad
    all_gather_split(x, 0).sum().backward()
    assert weight.grad.tolist() == [3.0, 3.0]


@pytest.mark.verifies(SYMBOLS[3])
def test_a_plain_collective_cuts_the_graph_and_ours_does_not(world):
    world(2).run(plain_collective_cuts_the_graph)
