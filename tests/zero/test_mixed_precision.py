"""Masters in 32 bits, a loss scale that all ranks share, and what they are for."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import batch_of, loss_of, make_model
from xtrain.data_parallel import DistributedDataParallel
from xtrain.zero import AdamW, LossScaler, MixedPrecisionOptimizer

SCALER = "xtrain.zero.mixed_precision:LossScaler"
MIXED = "xtrain.zero.mixed_precision:MixedPrecisionOptimizer"


@pytest.mark.verifies(MIXED)
def test_masters_and_weights_stay_linked():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    model.register_parameter("gain", nn.Parameter(torch.ones(2)))  # fp32 from the start
    optimizer = MixedPrecisionOptimizer(model.parameters(), AdamW, lr=0.05)
    assert {master.dtype for _, master in optimizer.pairs} == {torch.float32}
    assert len(optimizer.pairs) == 3  # a generator of parameters is used once
    before = [master.detach().clone() for _, master in optimizer.pairs]
    for _ in range(5):
        out = model(torch.ones(4, 3, dtype=torch.bfloat16)) * model.gain
        optimizer.backward(out.square().sum())
        assert optimizer.step()
        optimizer.zero_grad()
    for (parameter, master), old in zip(optimizer.pairs, before, strict=True):
        assert not torch.equal(master, old)
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert parameter.grad is None
        assert master.grad is None


@pytest.mark.verifies(MIXED)
def test_small_updates_add_up_in_the_master():
    """A step of a thousandth: a bf16 weight of 1 alone never moves, the master does."""
    alone = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    linked = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    plain = torch.optim.SGD([alone], lr=0.001)
    mixed = MixedPrecisionOptimizer([linked], torch.optim.SGD, lr=0.001)
    for _ in range(100):
        alone.grad = torch.ones_like(alone)
        linked.grad = torch.ones_like(linked)
        plain.step()
        mixed.step()
    assert alone.item() == 1.0
    assert mixed.pairs[0][1].item() == pytest.approx(0.9, abs=1e-5)
    assert linked.item() == pytest.approx(0.9, abs=0.004)


@pytest.mark.verifies(SCALER)
def test_the_scale_follows_overflows_and_good_steps():
    scaler = LossScaler(init_scale=8.0, growth_interval=3)
    scales = []
    for finite in (True, True, True, False, True, True, False, True, True, True):
        scaler.update(finite)
        scales.append(scaler.scale)
    assert scales == [8, 8, 16, 8, 8, 8, 4, 4, 4, 8]
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert (other.scale, other.good_steps) == (8, 0)
    for wrong in ({"init_scale": 0}, {"growth_factor": 1}, {"backoff_factor": 1}):
        with pytest.raises(ValueError, match="must be positive"):
            LossScaler(**wrong)


@pytest.mark.verifies(SCALER, MIXED)
def test_scaling_saves_small_fp16_gradients():
    """1e-8 is below fp16's smallest number; times 65536 it is not."""
    for scaler, moved in ((None, False), (LossScaler(), True)):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
        optimizer = MixedPrecisionOptimizer(
            [parameter], torch.optim.SGD, scaler, lr=1e6
        )
        optimizer.backward((parameter * 1e-4).float().sum() * 1e-4)
        optimizer.step()
        assert bool(parameter != 0) is moved
        if moved:
            assert parameter.item() == pytest.approx(-0.01, rel=0.01)


@pytest.mark.verifies(SCALER, MIXED)
def test_a_nan_is_skipped_and_forgotten():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = MixedPrecisionOptimizer(
        [parameter], AdamW, LossScaler(init_scale=4.0), lr=0.1
    )
    parameter.grad = torch.tensor([1.0, float("nan")], dtype=torch.float16)
    assert optimizer.step() is False
    assert optimizer.pairs[0][1].grad is None
    assert torch.equal(parameter, torch.ones_like(parameter))
    assert optimizer.optimizer.state == {}
    assert optimizer.scaler.scale == 2.0
    optimizer.zero_grad()
    optimizer.backward((parameter * parameter).sum())
    assert optimizer.step() is True
    assert torch.isfinite(parameter).all()
    assert (parameter < 1).all()


@pytest.mark.verifies(SCALER, MIXED)
def test_state_dict_brings_everything_back():
    torch.manual_seed(0)
    grads = [torch.randn(4, dtype=torch.float16) for _ in range(6)]

    def run(optimizer, parameter, part):
        for grad in part:
            parameter.grad = grad.clone()
            optimizer.step()
        return parameter.detach().clone(), optimizer.pairs[0][1].detach().clone()

    def make():
        parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
        scaler = LossScaler(growth_interval=4)
        return MixedPrecisionOptimizer([parameter], AdamW, scaler, lr=0.01), parameter

    straight = make()
    expected = run(*straight, grads)
    first, second = make(), make()
    run(*first, grads[:3])
    second[0].load_state_dict(first[0].state_dict())
    found = run(*second, grads[3:])
    assert all(map(torch.equal, found, expected))
    assert second[0].scaler.state_dict() == straight[0].scaler.state_dict()


def skip_together(bad_rank):
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = MixedPrecisionOptimizer(
        [parameter], AdamW, LossScaler(init_scale=2.0), lr=0.1
    )
    grad = torch.ones_like(parameter)
    if rank == bad_rank:
        grad[1] = float("inf")
    parameter.grad = grad
    stepped = optimizer.step()
    return stepped, optimizer.scaler.scale, parameter.tolist()


@pytest.mark.verifies(SCALER, MIXED)
def test_an_overflow_on_one_rank_makes_all_skip(world):
    results = world(3).run(skip_together, 1)
    assert results == [(False, 1.0, [1.0, 1.0, 1.0])] * 3
    assert [stepped for stepped, *_ in world(3).run(skip_together, 7)] == [True] * 3


def train_in_sixteen_bits(dtype):
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(rank, dtype=dtype))
    scaler = LossScaler(init_scale=1024.0) if dtype == torch.float16 else None
    optimizer = MixedPrecisionOptimizer(model.parameters(), AdamW, scaler, lr=0.02)
    losses = []
    for _ in range(30):
        loss = loss_of(model, batch_of(0, 0, rank)) / 20
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.verifies(SCALER, MIXED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_training_under_ddp(world, dtype):
    (losses, state), (_, other) = world(2).run(train_in_sixteen_bits, dtype)
    assert losses[-1] < losses[0] / 2
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.verifies(MIXED)
def test_loading_reaches_the_weights_too():
    saved, other = (
        MixedPrecisionOptimizer([nn.Parameter(value)], AdamW)
        for value in (torch.full((3,), 1.5).bfloat16(), torch.zeros(3).bfloat16())
    )
    other.load_state_dict(saved.state_dict())
    ((parameter, master),) = other.pairs
    assert parameter.tolist() == master.tolist() == [1.5] * 3


@pytest.mark.verifies(SCALER, MIXED)
def test_an_overflow_in_any_gradient_counts():
    for bad in range(3):
        parameters = [
            nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(3)
        ]
        optimizer = MixedPrecisionOptimizer(parameters, AdamW, LossScaler(4.0))
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.ones_like(parameter)
            if number == bad:
                parameter.grad[1] = float("-inf")
        assert optimizer.step() is False
        assert optimizer.scaler.scale == 2.0


@pytest.mark.verifies(MIXED)
def test_groups_keep_their_options():
    first, second = (nn.Parameter(torch.ones(2).bfloat16()) for _ in range(2))
    groups = [{"params": [first], "lr": 0.0}, {"params": [second]}]
    optimizer = MixedPrecisionOptimizer(groups, torch.optim.SGD, lr=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.5]
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [0.5, 0.5])


@pytest.mark.verifies(MIXED)
def test_a_gradient_that_is_gone_is_not_used_again():
    """The model's own `zero_grad` leaves the masters' gradients behind."""
    parameter = nn.Parameter(torch.ones(2).bfloat16())
    optimizer = MixedPrecisionOptimizer([parameter], torch.optim.SGD, lr=0.5)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.grad = None
    optimizer.step()
    assert parameter.tolist() == [0.5, 0.5]


@pytest.mark.verifies(SCALER)
def test_without_distribution_a_scaler_decides_alone():
    assert not dist.is_initialized()
    scaler = LossScaler(init_scale=4.0)
    gradient = torch.tensor([8.0, -2.0])
    assert scaler.unscale([gradient]) is True
    assert gradient.tolist() == [2.0, -0.5]
    assert scaler.unscale([]) is True
    assert scaler.scale_loss(torch.tensor(3.0)).item() == 12.0
