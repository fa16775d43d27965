"""Claims of the interview page of lc2, each run with and without its cause."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

from tests.training import adamw, batch_of, largest_difference, loss_of, make_model
from xtrain.comm import CommLedger
from xtrain.data_parallel import DistributedDataParallel


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
