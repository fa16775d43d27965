"""Claims of the interview page of lc2, each run with and without its cause."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

from tests.training import adamw, batch_of, largest_difference, loss_of, make_model
from xtrain.comm import CommLedger
from xtrain.data_parallel import DistributedDataParallel
from xtrain.plan import collective_time, compute_bound_tokens


def ranks() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# ------------------------------------------- an all-reduce of the loss, in the graph


def loss_reduced_in_the_graph():
    """The weight's gradient under a loss that a differentiable collective averages."""
    rank, size = ranks()
    weight = torch.ones((), requires_grad=True)
    own_loss = weight * (3.0 + 2 * rank)
    global_loss = differentiable.all_reduce(own_loss) / size
    global_loss.backward()
    return global_loss.item(), weight.grad.item()


def test_a_reduced_loss_in_the_graph_brings_no_other_gradient(world):
    """The loss is the global mean; each gradient is still that of the own sample."""
    assert world(2).run(loss_reduced_in_the_graph) == [(4.0, 3.0), (4.0, 5.0)]


# ------------------------------------------------------------ equal to a large batch

LAYERS = {"linear": nn.Identity, "layer norm": nn.LayerNorm,
          "batch norm": nn.BatchNorm1d, "dropout": nn.Dropout}  # fmt: skip


def gradient(kind: str, wrap: bool, rows: Tensor) -> Tensor:
    torch.manual_seed(0)
    middle = LAYERS[kind](0.5) if kind == "dropout" else LAYERS[kind](4)
    bare = nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 2)).double()
    model = DistributedDataParallel(bare) if wrap else bare
    torch.manual_seed(7 + dist.get_rank())
    model(rows).square().mean().backward()
    return bare[0].weight.grad.clone()


def beside_the_whole_batch(kind):
    """The largest difference between this rank's gradient and one process's."""
    rank, size = ranks()
    generator = torch.Generator().manual_seed(3)
    shape = (4 * size, 3)
    whole = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
    whole = whole.to(torch.get_default_device())
    own = gradient(kind, True, whole[4 * rank : 4 * rank + 4])
    return (own - gradient(kind, False, whole)).abs().max().item()


@pytest.mark.verifies("xtrain.data_parallel.ddp:DistributedDataParallel")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_large_batch_unless_samples_meet_or_dice_fall(world, kind):
    """Batch statistics look at other samples; dropout's masks are drawn anew."""
    differences = world(2).run(beside_the_whole_batch, kind)
    if kind in ("linear", "layer norm"):
        assert max(differences) < 1e-14
    else:
        assert min(differences) > 1e-4


# --------------------------------------------------- gradients first, or the updates


def first_gradients_or_first_updates(optimizer_class):
    """The weight after two steps: from mean gradients, and from the mean of updates."""
    rank, size = ranks()
    ends = []
    for gradients_first in (True, False):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = optimizer_class([weight], lr=0.1)
        for step in range(2):
            weight.grad = torch.tensor([1.0, -2.0, 0.1], dtype=torch.float64)
            weight.grad = weight.grad.to(weight.device) * (1 + 3 * rank - step)
            if gradients_first:
                dist.all_reduce(weight.grad)
                weight.grad /= size
            optimizer.step()
            if not gradients_first:
                dist.all_reduce(weight.data)
                weight.data /= size
        ends.append(weight.detach())
    return (ends[0] - ends[1]).abs().max().item()


def test_the_order_does_not_matter_to_sgd_and_does_to_adam(world):
    assert max(world(2).run(first_gradients_or_first_updates, torch.optim.SGD)) < 1e-14
    assert min(world(2).run(first_gradients_or_first_updates, torch.optim.Adam)) > 1e-2


# ------------------------------------------------ one large step, many small steps


def weights_after(rate: float, count: int, together: bool) -> Tensor:
    """SGD on `count` batches, one after the other or as one batch at `count` rates."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(count, 16, 3, generator=generator, device="cpu").double()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    steps = [batches.flatten(0, 1)] if together else list(batches)
    optimizer = torch.optim.SGD(model.parameters(), rate * count / len(steps))
    for batch in steps:
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_one_large_step_is_nearly_many_small_ones():
    """The difference is of second order: with half the rate it is a quarter."""
    start = weights_after(0.0, 4, together=True)
    moved, apart = [], []
    for rate in (1e-3, 5e-4):
        small, large = (weights_after(rate, 4, together) for together in (False, True))
        moved.append((large - start).norm())
        apart.append((large - small).norm())
    assert moved[0] / moved[1] == pytest.approx(2, rel=1e-6)
    assert apart[0] / apart[1] == pytest.approx(4, rel=0.05)


# ---------------------------------------------------- what backward hides, in tokens


@pytest.mark.verifies("xtrain.plan.throughput:compute_bound_tokens")
@pytest.mark.parametrize("itemsize", [2, 4])
def test_at_the_bound_a_ring_takes_as_long_as_backward(itemsize):
    """Whatever the model's size; a ring sends twice the gradients but for an N-th."""
    flops, bandwidth, ranks = 4e14, 5e10, 4096
    tokens = compute_bound_tokens(flops, bandwidth, itemsize)
    for parameters in (10**9, 70 * 10**9):
        backward = 4 * parameters * tokens / flops
        ring = collective_time(
            "ring_all_reduce", itemsize * parameters, ranks, 0.0, 1 / bandwidth
        )
        assert ring == pytest.approx(backward * (ranks - 1) / ranks)


# ------------------------------------------------------------------------ no_sync


def accumulate(last_one_too):
    """Weights and calls after a step of two micro-batches."""
    rank, _ = ranks()
    model = DistributedDataParallel(make_model(0))
    optimizer = adamw(model.parameters())
    with CommLedger() as ledger:
        with model.no_sync():
            loss_of(model, batch_of(0, 0, rank)).backward()
            if last_one_too:
                loss_of(model, batch_of(0, 1, rank)).backward()
        if not last_one_too:
            loss_of(model, batch_of(0, 1, rank)).backward()
    optimizer.step()
    reductions = [event for event in ledger.events if "reduce" in event.op]
    return len(reductions), model.state_dict()


@pytest.mark.verifies("xtrain.data_parallel.ddp:DistributedDataParallel")
def test_the_last_micro_batch_must_be_outside_no_sync(world):
    (calls, first), (_, second) = world(2).run(accumulate, False)
    assert calls >= 1
    assert largest_difference(first, second) == 0.0
    (calls, first), (_, second) = world(2).run(accumulate, True)
    assert calls == 0
    assert largest_difference(first, second) > 1e-3
