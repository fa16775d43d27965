"""Data parallelism equals one process on the whole batch, and torch's own class."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.devices import device_type
from tests.training import (
    adamw,
    batch_of,
    largest_difference,
    loss_of,
    make_model,
    reference,
)
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import CHOICES, TORCH, collectives_named
from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.data_parallel.buckets import make_buckets
from xtrain.testing import expect_error

DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"
STEPS = 20
TINY = 2**-10  # MiB: every bucket holds a parameter or two


def train(kind, reduction, micro_batches, frozen, choice, cap):
    rank = dist.get_rank()
    bare = make_model(100 + rank if rank else 0, frozen)
    if kind == "naive":
        model = NaiveDataParallel(bare, gradient_reduction=reduction)
    else:
        model = DistributedDataParallel(
            bare,
            bucket_cap_mb=cap,
            gradient_reduction=reduction,
            collectives=collectives_named(choice),
        )
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            quiet = (
                contextlib.nullcontext() if last or kind == "naive" else model.no_sync()
            )
            with quiet:
                loss_of(model, batch_of(step, micro, rank)).backward()
        if kind == "naive":
            model.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return dict(bare.state_dict())


@pytest.mark.verifies(
    DDP,
    "xtrain.data_parallel.replicas:broadcast_all",
    "xtrain.comm.backward:Reducer",
    "xtrain.data_parallel.buckets:Bucket",
    "xtrain.data_parallel.buckets:make_buckets",
    "xtrain.data_parallel.naive:NaiveDataParallel",
    "xtrain.comm.collective_choice:Collectives",
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_twenty_steps_equal_one_process(world, size):
    cases = [
        ("naive", "average", 1, False, "torch", 25),
        ("naive", "sum", 2, True, "torch", 25),
        ("ddp", "average", 1, False, "torch", 25),
        ("ddp", "average", 2, True, "torch", TINY),
        ("ddp", "sum", 1, False, "ring", TINY),
        ("ddp", "sum", 3, True, "ring", 25),
    ]
    for case in cases if size < 8 else cases[3::2]:
        _, reduction, micro_batches, frozen, *_ = case
        expected = reference(size, STEPS, micro_batches, reduction == "average", frozen)
        results = world(size).run(train, *case)
        for result in results:
            assert largest_difference(result, expected) < 1e-12, case
            assert largest_difference(result, results[0]) == 0.0, case


def gradients(wrap, kept):
    """The gradients of two backwards without zero_grad between, on this rank's data."""
    rank = dist.get_rank()
    model = wrap(make_model(5 + rank))
    for micro in range(2):
        loss_of(model, batch_of(0, micro, rank)).backward()
        if not kept:
            model.zero_grad()
    return [p.grad for p in model.parameters()]


def compare_with_torch():
    for kept in (True, False):
        ours = gradients(lambda m: DistributedDataParallel(m, bucket_cap_mb=TINY), kept)
        theirs = gradients(nn.parallel.DistributedDataParallel, kept)
        for mine, other in zip(ours, theirs, strict=True):
            if kept:
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
            else:
                assert mine is None
                assert other is None
    # In sum mode too a gradient that stays is counted once.
    summed = gradients(
        lambda m: DistributedDataParallel(m, gradient_reduction="sum"), True
    )
    averaged = gradients(DistributedDataParallel, True)
    for mine, other in zip(summed, averaged, strict=True):
        expected = other * dist.get_world_size()
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-11)


@pytest.mark.verifies(DDP)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_stay_are_counted_once(world, size):
    world(size).run(compare_with_torch)


def buffers_and_state():
    rank = dist.get_rank()
    bare = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = DistributedDataParallel(bare)
    torch.manual_seed(rank)
    model(torch.randn(6, 3)).sum().backward()
    mean_after_forward = bare[1].running_mean.clone()
    model(torch.randn(6, 3))  # begins with rank 0's buffers
    keys = list(model.state_dict())
    model.load_state_dict(bare.state_dict())
    model.load_state_dict({f"module.{n}": t for n, t in bare.state_dict().items()})
    return mean_after_forward, bare[1].num_batches_tracked.item(), keys


@pytest.mark.verifies(DDP)
def test_buffers_follow_rank_0_and_state_is_the_bare_modules(world):
    results = world(3).run(buffers_and_state)
    assert not torch.equal(results[0][0], results[1][0])
    assert [count for _, count, _ in results] == [2, 2, 2]
    bare = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert results[1][2] == list(bare.state_dict())


class Branches(nn.Module):
    """b takes part where it is asked to, c nowhere."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x, use_b):
        return self.a(x) + (self.b(x) if use_b else 0)


def unused(find):
    rank = dist.get_rank()
    model = DistributedDataParallel(Branches(), find_unused_parameters=find)
    model(torch.ones(1, 2), use_b=rank == 0).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.verifies(DDP)
def test_unused_parameters_are_named_on_every_rank(world):
    error = expect_error(
        world(3), unused, False, error=RuntimeError, match="got no gradient"
    )
    assert error is None or "c.weight" in str(error)


def unused_on_one_rank(find, choice):
    rank = dist.get_rank()
    bare = Branches()
    del bare.c
    model = DistributedDataParallel(
        bare,
        bucket_cap_mb=TINY,
        find_unused_parameters=find,
        collectives=collectives_named(choice),
    )
    grads = []
    for user in (0, 1):  # the last step leaves nothing behind for the next
        model(torch.ones(1, 2), use_b=rank == user).sum().backward()
        grads.append(bare.b.weight.grad.clone())
        model.zero_grad()
    model(torch.ones(1, 2), use_b=True).sum().backward()
    return [*grads, bare.b.weight.grad]


@pytest.mark.verifies(DDP)
@pytest.mark.parametrize("choice", CHOICES)
def test_a_parameter_unused_on_some_ranks_only(world, choice):
    """The ranks that used it must hear of it as well."""
    expect_error(
        world(3), unused_on_one_rank, False, choice, error=RuntimeError, match="no grad"
    )
    for first, second, everywhere in world(3).run(unused_on_one_rank, True, choice):
        torch.testing.assert_close(first, torch.full((2, 2), 1 / 3))
        torch.testing.assert_close(second, torch.full((2, 2), 1 / 3))
        torch.testing.assert_close(everywhere, torch.ones(2, 2))


def train_on():
    """The step after one that was refused."""
    bare = Branches()
    del bare.c
    model = DistributedDataParallel(bare)
    with pytest.raises(RuntimeError, match="got no gradient"):
        model(torch.ones(1, 2), use_b=dist.get_rank() == 0).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 2), use_b=True).sum().backward()
    return bare.b.weight.grad


@pytest.mark.verifies(DDP)
def test_a_refused_step_is_forgotten(world):
    for grad in world(2).run(train_on):
        torch.testing.assert_close(grad, torch.ones(2, 2))


@pytest.mark.verifies(DDP)
def test_unused_parameters_count_as_zero_on_request(world):
    for a, b, c in world(3).run(unused, True):
        torch.testing.assert_close(a, torch.ones(2, 2))
        torch.testing.assert_close(b, torch.full((2, 2), 1 / 3))
        assert c is None


def traffic(choice):
    rank, size = dist.get_rank(), dist.get_world_size()
    bare = make_model(rank, dtype=torch.float32)
    model = DistributedDataParallel(bare, collectives=collectives_named(choice))
    with CommLedger() as ledger, model.no_sync():
        loss_of(model, batch_of(0, 0, rank)).backward()
    assert ledger.events == []
    with CommLedger() as ledger:
        loss_of(model, batch_of(0, 1, rank)).backward()
    flat = sum(p.numel() for p in bare.parameters()) + 1  # the spare element
    chunks = [len(c) for c in torch.arange(flat).tensor_split(size)]
    reduce_scatter = sum(chunks) - chunks[rank]
    all_gather = sum(chunks) - chunks[(rank + 1) % size]
    # Without the buffers, which torch broadcasts: backends of ours count that too.
    sent = sum(event.nbytes for event in ledger.events if event.kind == "send")
    return sent, 4 * (reduce_scatter + all_gather)


@pytest.mark.verifies(DDP)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_step_sends_two_n_minus_one_nths_of_the_gradients(world, size):
    for sent, expected in world(size).run(traffic, "ring"):
        assert sent == expected


def overlapped():
    """The order of gradients and collectives of one backward."""
    events = []
    bare = nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)])

    def all_reduce(tensor, group=None):
        events.append("send")
        return TORCH.all_reduce(tensor, group=group)

    watched = replace(TORCH, all_reduce=all_reduce)
    model = DistributedDataParallel(bare, bucket_cap_mb=0.4, collectives=watched)
    for layer in bare:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: events.append("gradient")
        )
    model(torch.randn(2, 300)).sum().backward()
    return events


@pytest.mark.verifies(DDP)
def test_buckets_leave_while_backward_still_computes(world):
    for events in world(2).run(overlapped):
        first_send = events.index("send")
        assert "gradient" in events[first_send:], events
        assert events.count("send") == 4


@pytest.mark.verifies("xtrain.data_parallel.buckets:make_buckets")
def test_buckets_run_from_the_last_parameter_to_the_first():
    parameters = [nn.Parameter(torch.zeros(n)) for n in (5, 3, 7, 2)]
    parameters.append(nn.Parameter(torch.zeros(4, dtype=torch.float64)))
    buckets = make_buckets(parameters, cap_bytes=40)
    order = [[p.numel() for p in bucket.parameters] for bucket in buckets]
    assert order == [[4], [2, 7], [3, 5]]
    assert [bucket.spare.numel() for bucket in buckets] == [0, 0, 1]


@pytest.mark.verifies("xtrain.data_parallel.buckets:make_buckets")
def test_the_first_bucket_holds_a_mebibyte_and_the_others_the_cap():
    parameters = [nn.Parameter(torch.zeros(2**16)) for _ in range(12)]  # 3 MiB

    def sizes(cap_bytes):
        return [
            len(bucket.parameters) for bucket in make_buckets(parameters, cap_bytes)
        ]

    assert sizes(25 * 2**20) == [4, 8]
    assert sizes(3 * 2**19) == [4, 6, 2]
    first, _ = make_buckets(parameters, 25 * 2**20)
    last = parameters[:7:-1]  # what backward reaches first
    assert all(p is q for p, q in zip(first.parameters, last, strict=True))


@pytest.mark.verifies("xtrain.data_parallel.buckets:make_buckets")
def test_a_bucket_may_be_as_large_as_the_cap():
    parameters = [nn.Parameter(torch.zeros(5)) for _ in range(4)]
    for cap, expected in ((40, [2, 2]), (39, [1, 1, 1, 1]), (60, [3, 1])):
        buckets = make_buckets(parameters, cap)
        assert [len(bucket.parameters) for bucket in buckets] == expected


def own_buffers(broadcast):
    """A buffer when the wrapper is built, and after two forwards on own data."""
    rank = dist.get_rank()
    bare = nn.BatchNorm1d(2)
    bare.running_mean.fill_(10.0 * (1 + rank))
    model = DistributedDataParallel(bare, broadcast_buffers=broadcast)
    built = bare.running_mean.clone()
    for _ in range(2):
        model(torch.ones(4, 2) * rank)
    return built.tolist(), bare.running_mean.tolist()


@pytest.mark.verifies(DDP)
def test_buffers_begin_as_rank_0s_and_follow_it_only_where_wanted(world):
    for broadcast in (True, False):
        results = world(2).run(own_buffers, broadcast)
        assert [built for built, _ in results] == [[10.0, 10.0]] * 2
        (first, _), (second, _) = (after for _, after in results)
        # Means of 10 move a tenth of the way, twice; rank 1's data are ones.
        assert first == pytest.approx(8.1)
        alone = 0.9 * (0.9 * 10 + 0.1) + 0.1
        following = 0.9 * (0.9 * 10) + 0.1  # the second forward begins with rank 0's
        assert second == pytest.approx(following if broadcast else alone)


def under_autocast():
    model = DistributedDataParallel(make_model(dist.get_rank(), dtype=torch.float32))
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        loss = loss_of(model, batch_of(0, 0, 0))
    loss.backward()
    bare = make_model(0, dtype=torch.float32)
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        loss = loss_of(bare, batch_of(0, 0, 0))
    loss.backward()
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.verifies(DDP)
def test_it_works_inside_autocast(world):
    world(2).run(under_autocast)


def reduce_the_loss():
    """The loss value is summed over the ranks, in place, before backward."""
    rank = dist.get_rank()
    grads = []
    for reduce_loss in (False, True):
        model = make_model(0)
        loss = loss_of(model, batch_of(0, 0, rank))
        if reduce_loss:
            dist.all_reduce(loss.detach())
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    return loss.item(), grads


def test_reducing_the_loss_reduces_no_gradient(world):
    (loss_0, grads_0), (loss_1, grads_1) = world(2).run(reduce_the_loss)
    assert loss_0 == loss_1
    for without, with_reduced_loss in (grads_0, grads_1):
        assert all(map(torch.equal, without, with_reduced_loss))
    assert not torch.equal(grads_0[1][0], grads_1[1][0])


def deep_mlp():
    """Each rank its own loss; after backward all have the same gradients."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(12)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    torch.manual_seed(1 + dist.get_rank())
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@pytest.mark.verifies(DDP)
def test_losses_differ_and_gradients_agree(world):
    results = world(3).run(deep_mlp)
    assert len({loss for loss, _ in results}) == 3
    for _, grads in results:
        assert all(map(torch.equal, grads, results[0][1]))


def token_weighted(size, weighted):
    """Gradients of a mean over tokens that ranks have different numbers of."""
    rank = dist.get_rank()
    batches = [batch_of(0, 0, r) for r in range(size)]
    tokens = [batch[:, 1:].numel() for batch in batches]
    reduction = "sum" if weighted else "average"
    model = DistributedDataParallel(make_model(0), gradient_reduction=reduction)
    divisor = sum(tokens) if weighted else tokens[rank]
    (loss_of(model, batches[rank]) / divisor).backward()
    bare = make_model(0)
    for batch in batches:
        (loss_of(bare, batch) / sum(tokens)).backward()
    return max(
        (mine.grad - whole.grad).abs().max().item()
        for mine, whole in zip(model.parameters(), bare.parameters(), strict=True)
    )


@pytest.mark.verifies(DDP)
def test_a_mean_of_means_is_not_the_mean(world):
    assert max(world(3).run(token_weighted, 3, True)) < 1e-14
    assert min(world(3).run(token_weighted, 3, False)) > 1e-4


def different_dtypes():
    model = nn.Linear(2, 2)
    DistributedDataParallel(model.double() if dist.get_rank() == 2 else model)


@pytest.mark.verifies("xtrain.data_parallel.replicas:check_model", DDP)
def test_another_dtype_is_refused_on_every_rank(world):
    expect_error(
        world(3), different_dtypes, error=ValueError, match="2. float64 traine"
    )


def broken(how):
    """One step of `test_twenty_steps_equal_one_process`, with one thing missing."""
    rank = dist.get_rank()
    model = make_model(100 + rank if how == "other weights" and rank else 0)
    wrapped: nn.Module = model
    if how in ("summed", "whole"):
        reduction = "sum" if how == "summed" else "average"
        wrapped = DistributedDataParallel(model, gradient_reduction=reduction)
    optimizer = adamw(model.parameters())
    loss_of(wrapped, batch_of(0, 0, rank)).backward()
    if how == "other weights":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    optimizer.step()
    return dict(model.state_dict())


def test_the_reference_can_fail(world):
    """Without the broadcast, the reduction or its average the comparison above fails.

    AdamW hardly feels how large gradients are: a sum instead of an average shows less.
    """
    expected = reference(2, 1)
    for how, least in (
        ("other weights", 1e-2),
        ("own gradients", 1e-2),
        ("summed", 1e-10),
    ):
        results = world(2).run(broken, how)
        found = [largest_difference(result, expected) for result in results]
        assert max(found) > least, (how, found)
        if how != "summed":
            assert largest_difference(*results) > least, how
    for result in world(2).run(broken, "whole"):
        assert largest_difference(result, expected) < 1e-12
