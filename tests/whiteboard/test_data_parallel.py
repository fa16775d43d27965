"""The whiteboard forms of lc2 pass the library forms' checks, inside their limits.

Model, batches and the one process that they are compared with are those of
tests/data_parallel, where the samplers and unused parameters are tested for both forms:
every rank starts from weights of its own.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import (
    adamw,
    batch_of,
    largest_difference,
    loss_of,
    make_model,
    reference,
)
from xtrain.whiteboard.data_parallel.distributed_data_parallel import (
    DistributedDataParallel,
)
from xtrain.whiteboard.data_parallel.naive_data_parallel import NaiveDataParallel

NAIVE = "xtrain.whiteboard.data_parallel.naive_data_parallel:NaiveDataParallel"
DDP = (
    "xtrain.whiteboard.data_parallel.distributed_data_parallel:DistributedDataParallel"
)
STEPS = 5
TINY = 2**-10  # MiB: every bucket holds a parameter or two


def wrap(kind, bare, cap=25, group=None):
    if kind == "naive":
        return NaiveDataParallel(bare, group)
    return DistributedDataParallel(bare, group, bucket_cap_mb=cap)


def reduce(kind, model):
    if kind == "naive":
        model.reduce_gradients()


def train(kind, cap, micro_batches, frozen):
    rank = dist.get_rank()
    bare = make_model(100 + rank if rank else 0, frozen)
    model = wrap(kind, bare, cap)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    first = None
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss_of(model, batch_of(step, micro, rank)).backward()
        reduce(kind, model)
        first = first or [p.grad.clone() for p in bare.parameters() if p.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
    return dict(bare.state_dict()), first


def gradients_of_one_process(size, micro_batches, frozen):
    model = make_model(0, frozen)
    for micro, rank in itertools.product(range(micro_batches), range(size)):
        (loss_of(model, batch_of(0, micro, rank)) / size).backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


CASES = [
    pytest.param("naive", 25, 2, True, marks=pytest.mark.verifies(NAIVE)),
    pytest.param("ddp", 25, 1, False, marks=pytest.mark.verifies(DDP)),
    pytest.param("ddp", TINY, 2, True, marks=pytest.mark.verifies(DDP)),
]


@pytest.mark.parametrize(("kind", "cap", "micro_batches", "frozen"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_and_weights_equal_one_process(
    world, size, kind, cap, micro_batches, frozen
):
    weights = reference(size, STEPS, micro_batches, frozen=frozen)
    expected = gradients_of_one_process(size, micro_batches, frozen)
    results = world(size).run(train, kind, cap, micro_batches, frozen)
    for state, gradients in results:
        assert largest_difference(state, weights) < 1e-12
        assert largest_difference(state, results[0][0]) == 0.0
        for mine, whole in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)


KINDS = [
    pytest.param("naive", marks=pytest.mark.verifies(NAIVE)),
    pytest.param("ddp", marks=pytest.mark.verifies(DDP)),
]


def in_other_dtypes(kind):
    rank, differences = dist.get_rank(), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bare = nn.Linear(3, 5).to(dtype)
        model = wrap(kind, bare, 2**-16)
        for factor in (1.0, 2.0):  # onto gradients that stay
            (
                model(torch.full((2, 3), factor * (1 + rank), dtype=dtype)).sum()
            ).backward()
            if kind == "ddp" or factor == 2.0:
                reduce(kind, model)
        size = dist.get_world_size()
        mean = 2 * 3 * (1 + size) / 2
        assert bare.weight.grad.dtype == dtype
        differences.append((bare.weight.grad.double() - mean).abs().max().item())
    return differences


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_and_gradients_that_stay(world, kind):
    for differences in world(4).run(in_other_dtypes, kind):
        assert max(differences) == 0.0  # small whole numbers are exact


def overlapped():
    """The order of gradients and all-reduces of one backward; what was waited for."""
    events, all_reduce = [], dist.all_reduce
    bare = nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)])
    model = DistributedDataParallel(bare, bucket_cap_mb=0.4)
    for number, layer in enumerate(bare):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: events.append(f"gradient {number}")
        )

    def noted(tensor, group=None, async_op=False):
        assert async_op
        events.append("send")
        return all_reduce(tensor, group=group, async_op=True)

    dist.all_reduce = noted
    try:
        model(torch.randn(2, 300)).sum().backward()
    finally:
        dist.all_reduce = all_reduce
    return events


@pytest.mark.verifies(DDP)
def test_several_buckets_leave_from_the_last_layer_on_while_backward_computes(world):
    for events in world(2).run(overlapped):
        gradients = [f"gradient {n}" for n in (3, 2, 1, 0)]
        assert [e for e in events if e != "send"] == gradients
        assert events.count("send") == 4
        for later in gradients[1:]:  # one more bucket has left before each layer
            before = events[: events.index(later)]
            assert before.count("send") >= gradients.index(later)
