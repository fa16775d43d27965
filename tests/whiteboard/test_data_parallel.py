"""What the self-checks of lc2's whiteboard forms leave to the suite.

Branches that a rank leaves out, buckets that leave early, bytes of uneven chunks.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.data_parallel.test_naive import TwoRoads
from tests.training import (
    batch_of,
    loss_of,
    make_model,
)
from tests.whiteboard.ring_instead import ring_instead
from xtrain.comm import CommLedger
from xtrain.copying.forms import forms, header
from xtrain.whiteboard.data_parallel import distributed_data_parallel as ddp
from xtrain.whiteboard.data_parallel import naive_data_parallel as naive
from xtrain.whiteboard.data_parallel.distributed_data_parallel import (
    DistributedDataParallel,
)
from xtrain.whiteboard.data_parallel.distributed_sampler import DistributedSampler
from xtrain.whiteboard.data_parallel.naive_data_parallel import NaiveDataParallel

SAMPLER = "xtrain.whiteboard.data_parallel.distributed_sampler:DistributedSampler"
NAIVE = "xtrain.whiteboard.data_parallel.naive_data_parallel:NaiveDataParallel"
DDP = (
    "xtrain.whiteboard.data_parallel.distributed_data_parallel:DistributedDataParallel"
)
TINY = 2**-10  # MiB: every bucket holds a parameter or two


def from_the_group():
    return list(DistributedSampler(range(6), shuffle=False))


def wrap(kind, bare, cap=25, group=None):
    if kind == "naive":
        return NaiveDataParallel(bare, group)
    return DistributedDataParallel(bare, group, bucket_cap_mb=cap)


def reduce(kind, model):
    if kind == "naive":
        model.reduce_gradients()


KINDS = [
    pytest.param("naive", marks=pytest.mark.verifies(NAIVE)),
    pytest.param("ddp", marks=pytest.mark.verifies(DDP)),
]


def other_roads(kind):
    """Each rank uses another branch; the second step is one after the first."""
    rank = dist.get_rank()
    model = wrap(kind, TwoRoads(), 1e-6)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([10.0**rank]), ("left", "right")[rank % 2]).sum().backward()
        reduce(kind, model)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_no_part_counts_as_zero(world, kind):
    for left, right, frozen in world(3).run(other_roads, kind):
        assert left.item() == pytest.approx(101 / 3)
        assert right.item() == pytest.approx(10 / 3)
        assert frozen is None


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


FORMULA = "2(N-1)/N of the gradients a step"


def traffic(kind):
    rank, size = dist.get_rank(), dist.get_world_size()
    bare = make_model(rank, dtype=torch.float32)
    model = wrap(kind, bare, TINY)
    with CommLedger() as ledger, ring_instead({"naive": naive, "ddp": ddp}[kind]):
        loss_of(model, batch_of(0, 1, rank)).backward()
        reduce(kind, model)
    nbytes = sum(p.nbytes for p in bare.parameters())
    return ledger.bytes_sent, 2 * (size - 1) * nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_step_sends_what_the_header_says(world, size, kind):
    """Over all ranks: one rank sends a little more or less of uneven chunks."""
    name = {"naive": "naive_data_parallel", "ddp": "distributed_data_parallel"}[kind]
    assert header(forms()[name].read_text())["Sends"].startswith(FORMULA)
    sent, expected = zip(*world(size).run(traffic, kind), strict=True)
    assert sum(sent) == expected[0]


@pytest.mark.verifies(SAMPLER)
def test_the_sampler_sends_nothing(world):
    assert header(forms()["distributed_sampler"].read_text())["Sends"].startswith(
        "nothing"
    )
    assert world(2).run(sent_by_the_sampler) == [0, 0]


def sent_by_the_sampler():
    with CommLedger() as ledger:
        from_the_group()
    return len(ledger.events)
