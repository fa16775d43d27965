"""Ranks with different numbers of batches."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import adamw, batch_of, largest_difference, loss_of, make_model
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import collectives_named
from xtrain.data_parallel import DistributedDataParallel
from xtrain.data_parallel import join as join_file
from xtrain.data_parallel.join import shadow_step
from xtrain.testing import expect_error
from xtrain.zero import LossScaler

JOIN_STATE = "xtrain.data_parallel.join:JoinState"
DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"
JOIN = "xtrain.data_parallel.join:join"


def steps_of(rank):
    return 2 + 3 * rank % 5  # 2, 5, 3, 6: neither first nor last goes on longest


def train(wrap, by_initial_size):
    rank = dist.get_rank()
    if wrap == "torch":
        model = nn.parallel.DistributedDataParallel(make_model(rank))
    else:
        model = DistributedDataParallel(
            make_model(rank),
            collectives=collectives_named("ring" if wrap == "ring" else "torch"),
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with model.join(divide_by_initial_world_size=by_initial_size):
        for step in range(steps_of(rank)):
            loss_of(model, batch_of(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    after = dict(model.module.state_dict())
    if wrap != "torch":  # and a common step works again, divided by all
        loss_of(model, batch_of(9, 0, rank)).backward()
        again = dict(model.named_parameters())
        return after, {name: p.grad for name, p in again.items()}
    return after, None


def one_process(size, by_initial_size):
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(max(map(steps_of, range(size)))):
        there = [rank for rank in range(size) if step < steps_of(rank)]
        for rank in there:
            divisor = size if by_initial_size else len(there)
            (loss_of(model, batch_of(step, 0, rank)) / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = {name: t.clone() for name, t in model.state_dict().items()}
    for rank in range(size):
        (loss_of(model, batch_of(9, 0, rank)) / size).backward()
    return after, {f"module.{n}": p.grad for n, p in model.named_parameters()}


@pytest.mark.verifies(JOIN_STATE, DDP, JOIN, "xtrain.data_parallel.join:shadow_step")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("by_initial_size", [True, False])
def test_uneven_inputs_equal_one_process_and_torch(world, size, by_initial_size):
    expected, gradients = one_process(size, by_initial_size)
    for wrap in ("ours", "ring", "torch"):
        for after, again in world(size).run(train, wrap, by_initial_size):
            assert largest_difference(after, expected) < 1e-12
            if again is not None:
                assert largest_difference(again, gradients) < 1e-12


def join_with_buffers_and_unused():
    rank = dist.get_rank()
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    model.unused_seen = []
    torch.manual_seed(rank)
    with model.join():
        for step in range(2 - rank):  # rank 1 leaves first, rank 2 has nothing at all
            model(torch.randn(4, 2) + 5, use_b=step == 0).sum().backward()
    return dict(model.module.state_dict()), model.module.c.weight.grad


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x, use_b):
        x = self.norm(x)
        return self.a(x) + (self.b(x) if use_b else 0)


@pytest.mark.verifies(DDP, JOIN)
def test_buffers_follow_a_rank_that_has_inputs(world):
    results = world(3).run(join_with_buffers_and_unused)
    for state, grad in results:
        assert largest_difference(state, results[0][0]) == 0.0
        assert state["norm.num_batches_tracked"] == 2
        assert state["norm.running_mean"].mean() > 0.5
        assert grad is None  # unused on all that had inputs


def complains():
    model = DistributedDataParallel(Branches())
    with model.join():
        for _ in range(1 - dist.get_rank()):
            model(torch.randn(4, 2), use_b=True).sum().backward()


@pytest.mark.verifies(DDP, JOIN)
def test_a_shadow_raises_with_the_others(world):
    expect_error(world(2), complains, error=RuntimeError, match="got no gradient")


def with_r_plus_1_batches(make_optimizer, micros, divisor):
    """One process, with r + 1 batches of rank r: the weights afterwards."""
    size, bare = dist.get_world_size(), make_model(0)
    optimizer = make_optimizer(bare.parameters())
    for step in range(size):
        for rank in range(step, size):
            for micro in micros:
                loss = loss_of(bare, batch_of(step, micro, rank))
                (loss / divisor(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(bare.state_dict())


def accumulate(by_method):
    """no_sync inside join, and a forward without gradients: no messages are sent.

    The last micro-batch reduces, or `reduce_gradients` does.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(rank))
    optimizer = adamw(model.parameters())
    with model.join():
        for step in range(1 + rank):
            with model.no_sync():
                loss_of(model, batch_of(step, 0, rank)).backward()
            with torch.no_grad():
                loss_of(model, batch_of(step, 1, rank))
            with model.no_sync() if by_method else contextlib.nullcontext():
                loss_of(model, batch_of(step, 2, rank)).backward()
            if by_method:
                model.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
    expected = with_r_plus_1_batches(adamw, (0, 2), lambda step: size)
    assert largest_difference(dict(model.state_dict()), expected) < 1e-12


@pytest.mark.verifies(DDP, JOIN)
@pytest.mark.parametrize("by_method", [False, True])
def test_accumulation_inside(world, by_method):
    world(3).run(accumulate, by_method)


def accumulate_every(by_initial_size, reduction):
    """Two micro-batches a step, both reduced; the second adds to the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(rank), gradient_reduction=reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with model.join(divide_by_initial_world_size=by_initial_size):
        for step in range(1 + rank):
            for micro in range(2):
                loss_of(model, batch_of(step, micro, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def divisor(step):
        active = size if by_initial_size else size - step
        return active if reduction == "average" else 1

    make = partial(torch.optim.SGD, lr=0.02)
    expected = with_r_plus_1_batches(make, range(2), divisor)
    assert largest_difference(dict(model.module.state_dict()), expected) < 1e-12


@pytest.mark.verifies(DDP, JOIN)
@pytest.mark.parametrize(
    ("by_initial_size", "reduction"),
    [(True, "average"), (False, "average"), (True, "sum")],
)
def test_what_was_reduced_before_is_counted_once(world, by_initial_size, reduction):
    world(3).run(accumulate_every, by_initial_size, reduction)


def run_ahead():
    """F0 F1 B0 B1."""
    model = DistributedDataParallel(make_model(0))
    with model.join():
        losses = [loss_of(model, batch_of(0, micro, 0)) for micro in range(2)]
        for loss in losses:
            loss.backward()


@pytest.mark.verifies(DDP, JOIN_STATE)
def test_a_forward_ahead_of_a_backward_is_refused(world):
    expect_error(
        world(2), run_ahead, match="second forward before the backward of the first"
    )


def scaled_by_ours():
    """Rank 0 has fewer steps; in the last one of rank 1 a gradient is infinite."""
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(0, dtype=torch.float32))
    scaler = LossScaler(init_scale=8.0)
    answers = []
    with model.join():
        for step in range(1 + rank):
            loss = scaler.scale_loss(loss_of(model, batch_of(step, 0, rank)))
            (loss * (float("inf") if step else 1)).backward()
            answers.append(scaler.unscale([p.grad for p in model.parameters()]))
            model.zero_grad()
    infinite = torch.tensor([float("inf") if rank else 1.0])
    return answers, scaler.unscale([infinite])  # outside it asks: one says no


@pytest.mark.verifies(
    "xtrain.comm.uneven:uneven_calls",
    "xtrain.comm.uneven:has_uneven_calls",
    JOIN,
    "xtrain.zero.mixed_precision:LossScaler",
)
def test_a_loss_scaler_asks_no_rank_whose_inputs_are_over(world):
    first, second = world(2).run(scaled_by_ours)
    assert first == ([True], False)
    assert second == ([True, False], False)


def forward_afterwards():
    """Collectives of a forward inside the context, and of one after it."""
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(0), broadcast_buffers=False)
    counts = []

    def forward():
        with CommLedger() as ledger:
            loss = loss_of(model, batch_of(0, 0, rank))
        counts.append(len(ledger.events))
        return loss

    with model.join():
        forward().backward()
    forward()
    return counts


@pytest.mark.verifies(JOIN_STATE, DDP, JOIN)
def test_after_join_no_messages_are_sent(world):
    for inside, outside in world(2).run(forward_afterwards):
        assert inside > 0
        assert outside == 0


class Remembers(nn.Module):
    """A buffer that every forward changes."""

    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("seen", torch.full((2,), 100.0 * rank).double())

    def forward(self, x):
        self.seen += x.mean()
        return (self.weight * x).sum()


def shadows_with_buffers(steps):
    """On a rank without inputs: whose step it met, and its buffer after that."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Remembers(rank))
    seen = []

    def look(model, source_rank):
        shadow_step(model, source_rank)
        seen.append((source_rank, model.module.seen[0].item()))

    with replaced(join_file, "shadow_step", look), model.join():
        for step in range(steps[rank]):
            model(torch.full((1,), 1.0 + step + 10 * rank).double()).backward()
            model.zero_grad()
    return seen


@pytest.mark.verifies(DDP, JOIN)
def test_a_shadow_has_the_buffers_of_the_step(world):
    """Rank 1 goes on alone: its buffers are sent before its forward changes them."""
    (shadow, last) = world(2).run(shadows_with_buffers, [1, 3])
    assert last == []
    # Rank 0's 0 was on all ranks in step 0; rank 1 then added 11, 12 and 13.
    assert shadow == [(1, 11.0), (1, 23.0)]
