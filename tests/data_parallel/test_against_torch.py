"""What the pages of lc2 say about torch's own classes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader

from tests.training import adamw, batch_of, largest_difference, loss_of, make_model
from xtrain.comm import CommLedger
from xtrain.data_parallel import DistributedDataParallel, DistributedSampler

DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"


@pytest.fixture(autouse=True)
def on_cpu(xtrain_worlds):
    """Skip elsewhere: torch's classes are looked at on CPUs, over any backend."""
    if xtrain_worlds.device != "cpu":
        pytest.skip("what torch's classes do is looked at on CPUs")


def trained(wrap):
    """The weights after twenty steps of AdamW, from other weights on each rank."""
    rank = dist.get_rank()
    bare = make_model(rank)
    model = wrap(bare)
    optimizer = adamw(model.parameters())
    for step in range(20):
        loss_of(model, batch_of(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(bare.state_dict())


@pytest.mark.verifies(DDP)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_twenty_steps_are_those_of_torch(world, size):
    """Two numbers have one sum; of more it depends on the order of a bucket."""
    ours = world(size).run(trained, DistributedDataParallel)
    theirs = world(size).run(trained, TorchDDP)
    for mine, other in zip(ours, theirs, strict=True):
        difference = largest_difference(mine, other)
        assert difference == 0.0 if size == 2 else difference < 1e-12


def reduced(wrap):
    """The bytes of each all-reduce of a step, of 6 layers of 64 x 64."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = wrap(net, bucket_cap_mb=1)
    for _ in range(3):  # torch makes its buckets anew after the first step
        with CommLedger() as ledger:
            model(torch.ones(2, 64)).sum().backward()
    return [event.payload for event in ledger.events if event.kind == "collective"]


@pytest.mark.verifies(DDP)
def test_a_step_reduces_torchs_bytes_and_a_flag(world):
    parameters = 6 * (64 * 64 + 64)
    assert world(2).run(reduced, TorchDDP) == [[4 * parameters]] * 2
    assert world(2).run(reduced, DistributedDataParallel) == [[4 * parameters + 4]] * 2


def accumulated(wrap):
    """The gradients of three micro-batches, the last of them outside `no_sync`."""
    rank = dist.get_rank()
    model = wrap(make_model(rank))
    with model.no_sync():
        for micro in range(2):
            loss_of(model, batch_of(0, micro, rank)).backward()
    loss_of(model, batch_of(0, 2, rank)).backward()
    return {name: p.grad for name, p in model.module.named_parameters()}


@pytest.mark.verifies(DDP)
@pytest.mark.parametrize("size", [2, 3])
def test_no_sync_gives_torchs_gradient(world, size):
    ours = world(size).run(accumulated, DistributedDataParallel)
    theirs = world(size).run(accumulated, TorchDDP)
    for mine, other in zip(ours, theirs, strict=True):
        assert largest_difference(mine, other) < 1e-12
        assert largest_difference(mine, ours[0]) == 0.0


class TwoRoads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(1, 1, bias=False) for _ in range(2))

    def forward(self, x, road):
        return getattr(self, road)(x)


def one_step_with_an_unused_parameter(wrap):
    """What two steps with an unused parameter complain about."""
    model, complaints = wrap(TwoRoads()), []
    for _ in range(2):
        try:
            model(torch.ones(1, 1), "left").sum().backward()
        except RuntimeError as error:
            complaints.append(str(error))
        else:
            complaints.append("")
        model.zero_grad()
    return complaints


def test_torch_notices_an_unused_parameter_one_step_late(world):
    for first, second in world(2).run(one_step_with_an_unused_parameter, TorchDDP):
        assert first == ""
        assert "Expected to have finished reduction in the prior iteration" in second
    ours = world(2).run(one_step_with_an_unused_parameter, DistributedDataParallel)
    for first, _ in ours:
        assert "right.weight" in first


def around_the_wrapper(wrap):
    """The gradient when the bare module is called instead of the wrapper."""
    rank = dist.get_rank()
    model = wrap(nn.Linear(1, 1, bias=False))
    model(torch.ones(1, 1)).sum().backward()
    model.zero_grad()
    model.module(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return model.module.weight.grad.item()


def test_torch_reduces_nothing_if_the_bare_module_is_called(world):
    assert world(2).run(around_the_wrapper, TorchDDP) == [1.0, 2.0]
    assert world(2).run(around_the_wrapper, DistributedDataParallel) == [1.5, 1.5]


def two_forwards(wrap):
    """The gradient of two forwards before one backward, with buffers in the graph."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = layers if wrap is None else wrap(layers)
    torch.manual_seed(dist.get_rank())
    first, second = model(torch.randn(4, 3)), model(torch.randn(4, 3))
    (first - second).pow(3).sum().backward()
    return layers[0].weight.grad


def two_forwards_of_torch():
    """The gradient, or why an older torch refuses."""
    try:
        return two_forwards(TorchDDP)
    except RuntimeError as error:
        return str(error)


@pytest.mark.verifies("xtrain.data_parallel.replicas:broadcast_all")
def test_two_forwards_and_one_backward_with_buffers(world):
    """The second broadcast writes into buffers that the first graph holds."""
    # Batch norm reads no buffer in training: each rank's own gradient is the bare one.
    mean = torch.stack(world(2).run(two_forwards, None)).mean(0)
    for gradient in world(2).run(two_forwards, DistributedDataParallel):
        torch.testing.assert_close(gradient, mean)
    for answer in world(2).run(two_forwards_of_torch):
        if isinstance(answer, str):
            assert torch.__version__ < (2, 13)
            assert "modified by an inplace operation" in answer
        else:
            torch.testing.assert_close(answer, mean)


def test_a_loader_does_not_shuffle_what_a_sampler_deals():
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="mutually exclusive"):
        DataLoader(range(4), sampler=sampler, shuffle=True)
