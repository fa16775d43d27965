"""The classic bugs of lc2: each broken twin fails the check that the right code passes.

As in the gallery of lc1, a check is a function that ranks run with the function under
test. Where the bug ends in weights that drift apart, `check_replicas` must name it.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from snippets.wrong.lc2 import (
    gradients_kept_apart,
    hook_before_accumulation,
    hook_gets_the_parameter,
    last_inside_no_sync,
    mean_of_means,
    no_first_broadcast,
    no_sync_around_backward,
    only_if_dp,
    padding_counted,
    reduced_every_time,
    runs_out_early,
    same_order_every_epoch,
    skips_the_unused,
    sum_for_mean,
    tied_reduced_twice,
    works_on_a_copy,
)
from torch import nn
from torch.nn import functional as F

from tests.snippets.gallery import all_fail, failures, ranks
from tests.training import batch_of, loss_of, make_model
from xtrain.comm import CommLedger
from xtrain.data_parallel import (
    DistributedDataParallel,
    DistributedSampler,
    NaiveDataParallel,
    check_replicas,
)
from xtrain.testing import RankTimeout

DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"
NAIVE = "xtrain.data_parallel.naive:NaiveDataParallel"
SAMPLER = "xtrain.data_parallel.sampler:DistributedSampler"
REPLICAS = "xtrain.data_parallel.replicas:check_replicas"

# ------------------------------------------------------------------ the first weights


def weights_are_shared(share) -> None:
    """Every rank begins elsewhere; afterwards all have what rank 0 began with."""
    rank, _ = ranks()
    model, first = make_model(rank), make_model(0)
    share(model)
    for mine, its in zip(model.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, its)


def replicas_agree(wrap) -> None:
    """After a step, in the words of `check_replicas`."""
    rank, _ = ranks()
    model = wrap(make_model(rank))
    bare = model.module
    loss_of(bare, batch_of(0, 0, rank)).backward()
    model.reduce_gradients()
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    check_replicas(bare)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(DDP, NAIVE, "xtrain.data_parallel.replicas:broadcast_all")
def test_a_broadcast_into_a_copy_shares_nothing(worlds, size):
    for right in (NaiveDataParallel, DistributedDataParallel):
        worlds[size].run(weights_are_shared, right)
    failed = failures(worlds[size], weights_are_shared, works_on_a_copy.share_weights)
    assert failed.keys() == set(range(1, size))  # rank 0 has nothing to copy


@pytest.mark.verifies(NAIVE, REPLICAS)
def test_without_a_broadcast_the_replicas_are_named(worlds):
    worlds[3].run(replicas_agree, NaiveDataParallel)
    failed = failures(worlds[3], replicas_agree, no_first_broadcast.DataParallel)
    assert failed.keys() == {0, 1, 2}
    for said in failed.values():
        assert "replicas differ" in said
        assert "embed_tokens.weight on ranks [1, 2] is not rank 0's" in said


def distance_stays(wrap, seed_by_rank) -> None:
    """The same gradients keep other weights as far apart as they were."""
    rank, _ = ranks()
    torch.manual_seed(rank if seed_by_rank else 0)
    model = wrap(nn.Linear(3, 1, bias=False).double())
    weight, apart = model.module.weight, []
    torch.manual_seed(9 + rank)
    for _step in range(5):
        first = weight.detach().clone()
        dist.broadcast(first, src=0)
        apart.append((weight - first).norm().item())
        model.module(torch.randn(4, 3).double()).square().mean().backward()
        model.reduce_gradients()
        weight.data.sub_(0.1 * weight.grad)
        weight.grad = None
    assert max(apart) - min(apart) < 1e-12
    assert rank == 0 or not seed_by_rank or min(apart) > 0.1


def test_the_ranks_stay_a_constant_apart(worlds):
    worlds[2].run(distance_stays, no_first_broadcast.DataParallel, True)
    worlds[2].run(distance_stays, no_first_broadcast.DataParallel, False)  # hidden


# -------------------------------------------------------------------- the gradients


def one_process(size, reduction="mean"):
    """Gradients of all ranks' batches in one process."""
    model = make_model(0)
    for rank in range(size):
        loss = loss_of(model, batch_of(0, 0, rank))
        (loss / (size if reduction == "mean" else 1)).backward()
    return [p.grad for p in model.parameters()]


CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}


def gradients_are_right(reduce, dtype=torch.float64, reduction="mean") -> None:
    """Compares gradients, for Adam's steps hide a factor."""
    rank, size = ranks()
    exact, model = make_model(0), make_model(0, dtype=dtype)
    loss_of(exact, batch_of(0, 0, rank)).backward()
    for mine, its in zip(model.parameters(), exact.parameters(), strict=True):
        mine.grad = its.grad.to(dtype)
    reduce(model)
    whole = one_process(size, reduction)
    for mine, right in zip(model.parameters(), whole, strict=True):
        apart = (mine.grad.double() - right).norm()
        assert apart <= CLOSE[dtype] * right.norm(), (
            f"off by {apart / right.norm():.2f}"
        )


def by_naive(model):
    NaiveDataParallel(model).reduce_gradients()


def by_naive_sum(model):
    NaiveDataParallel(model, gradient_reduction="sum").reduce_gradients()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.verifies(NAIVE)
def test_a_reduced_copy_shows_in_bf16_only(worlds, size):
    wrong = works_on_a_copy.average_gradients
    for dtype in (torch.float32, torch.bfloat16):
        worlds[size].run(gradients_are_right, by_naive, dtype)
    worlds[size].run(gradients_are_right, wrong, torch.float32)  # what hides it
    all_fail(worlds[size], gradients_are_right, wrong, torch.bfloat16)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.verifies(NAIVE)
def test_a_sum_for_a_mean_shows_in_gradients(worlds, size):
    wrong = sum_for_mean.reduce_gradients
    worlds[size].run(gradients_are_right, by_naive)
    all_fail(worlds[size], gradients_are_right, wrong)
    worlds[size].run(adam_is_right, by_naive)
    worlds[size].run(adam_is_right, wrong)  # what hides it
    worlds[1].run(gradients_are_right, wrong)


def adam_is_right(reduce) -> None:
    rank, size = ranks()
    torch.manual_seed(0)
    data = torch.randn(size, 8, 1).double()
    alone, _ = sum_for_mean.train(torch.optim.Adam, data.flatten(0, 1), lambda _: None)
    together, _ = sum_for_mean.train(torch.optim.Adam, data[rank], reduce)
    assert abs(alone - together) < 1e-6


def tied_gradients_are_right(reduce) -> None:
    gradients_are_right(reduce, reduction="sum")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(NAIVE)
def test_a_tied_parameter_is_reduced_once(worlds, size):
    worlds[size].run(tied_gradients_are_right, by_naive_sum)
    wrong = tied_reduced_twice.reduce_gradients
    assert len(failures(worlds[size], tied_gradients_are_right, wrong)) == size


def tied_ddp(size) -> None:
    """The model of `make_model` ties its head to its embedding."""
    rank, _ = ranks()
    model = DistributedDataParallel(make_model(rank), gradient_reduction="sum")
    loss_of(model, batch_of(0, 0, rank)).backward()
    for mine, whole in zip(model.parameters(), one_process(size, "sum"), strict=True):
        torch.testing.assert_close(mine.grad, whole, rtol=0, atol=1e-12)


@pytest.mark.verifies(DDP)
def test_ddp_reduces_a_tied_parameter_once(worlds):
    worlds[2].run(tied_ddp, 2)


def roads_are_right(reduce, **options) -> None:
    """Each of two ranks uses another parameter; both get both gradients.

    Without `reduce` DistributedDataParallel reduces, with these options.
    """
    rank, size = ranks()
    bare = skips_the_unused.TwoRoads()
    model = bare if reduce else DistributedDataParallel(bare, **options)
    samples = [10.0, 1000.0]
    model(torch.tensor([samples[rank]]), ("left", "right")[rank]).sum().backward()
    if reduce:
        reduce(bare)
    found = [getattr(bare, road).weight.grad for road in ("left", "right")]
    assert [g and g.item() for g in found] == [s / size for s in samples]


@pytest.mark.verifies(DDP, NAIVE)
def test_unused_parameters_do_not_mix_with_others(worlds):
    worlds[2].run(roads_are_right, by_naive)
    worlds[2].run(partial(roads_are_right, None, find_unused_parameters=True))
    wrong = skips_the_unused.reduce_gradients
    assert len(failures(worlds[2], roads_are_right, wrong)) == 2
    refused = failures(worlds[2], roads_are_right, None)
    assert "['right.weight']" in refused[0]
    assert "['left.weight']" in refused[1]


def odd_parameters() -> None:
    """A frozen one, an empty one and one that is tied, through a step of DDP."""
    rank, _ = ranks()
    bare = make_model(rank, frozen=True)
    bare.register_parameter("empty", nn.Parameter(torch.zeros(0, 3).double()))
    model = DistributedDataParallel(bare)
    (loss_of(model, batch_of(0, 0, rank)) + bare.empty.sum()).backward()
    assert bare.layers[1].mlp.up_proj.weight.grad is None
    assert bare.empty.grad.shape == (0, 3)
    torch.optim.AdamW(model.parameters()).step()
    check_replicas(model)


def frozen_too_late() -> None:
    model = DistributedDataParallel(make_model(0))
    model.module.norm.requires_grad_(False)
    loss_of(model, batch_of(0, 0, ranks()[0])).backward()


@pytest.mark.verifies(DDP)
def test_frozen_empty_and_tied_parameters_together(worlds):
    worlds[2].run(odd_parameters)
    refused = failures(worlds[2], frozen_too_late)
    assert refused.keys() == {0, 1}
    assert all("norm.weight" in said for said in refused.values())


# ------------------------------------------------------------------------ the tokens


def by_token_count(model, tokens, labels):
    """Sums, a global count, and a wrapper that does not average."""
    count = (labels != -100).sum()
    dist.all_reduce(count)
    wrapped = DistributedDataParallel(model, gradient_reduction="sum")
    loss = F.cross_entropy(wrapped(tokens), labels, reduction="sum") / count
    loss.backward()
    return loss


def every_token_counts_alike(backward, counts) -> None:
    rank, size = ranks()
    torch.manual_seed(0)
    tokens = torch.randn(size, 8, 4).double()
    labels = torch.randint(3, (size, 8))
    for row, count in zip(labels, counts, strict=True):
        row[count:] = -100
    models = [nn.Linear(4, 3).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    F.cross_entropy(models[0](tokens.flatten(0, 1)), labels.flatten()).backward()
    loss = backward(models[1], tokens[rank], labels[rank])
    assert torch.isfinite(loss)
    grads = [m.weight.grad for m in models]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.verifies(DDP)
def test_a_mean_of_means_needs_ragged_counts_to_show(worlds):
    wrong = mean_of_means.backward
    for counts in ([8, 8], [8, 2], [5, 0]):
        worlds[2].run(every_token_counts_alike, by_token_count, counts)
    worlds[2].run(every_token_counts_alike, wrong, [8, 8])  # what hides it
    for counts in ([8, 2], [5, 0]):
        assert len(failures(worlds[2], every_token_counts_alike, wrong, counts)) == 2


def test_the_mean_of_no_tokens():
    """torch's own loss has a gradient of zero then, a masked sum over a count NaN."""
    logits = torch.randn(4, 3, requires_grad=True)
    loss = F.cross_entropy(logits, torch.full((4,), -100))
    assert bool(loss.isnan())
    loss.backward()
    assert logits.grad.count_nonzero() == 0
    mask = torch.zeros(4)
    (logits.logsumexp(1) * mask).sum().div(mask.sum()).backward()
    assert bool(logits.grad.isnan().all())


# ----------------------------------------------------------------- accumulation, hooks


def accumulate_with_no_sync(model, batches):
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with nullcontext() if last else model.no_sync():
            loss = model(batch).square().mean() / len(batches)
            loss.backward()


def accumulation_is_right(accumulate) -> None:
    rank, size = ranks()
    torch.manual_seed(0)
    batches = torch.randn(size, 4, 3, 5).double()
    model = DistributedDataParallel(nn.Linear(5, 2).double())
    accumulate(model, batches[rank])
    bare = nn.Linear(5, 2).double()
    bare.load_state_dict(model.state_dict())
    bare(batches.flatten(0, 2)).square().mean().backward()
    torch.testing.assert_close(
        model.module.weight.grad, bare.weight.grad, rtol=0, atol=1e-12
    )


def agree_after_a_step(accumulate) -> None:
    rank, _ = ranks()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(5, 2))
    accumulate(model, torch.randn(4, 3, 5))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    check_replicas(model)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(DDP, REPLICAS)
def test_a_last_micro_batch_inside_no_sync(worlds, size):
    wrong = last_inside_no_sync.accumulate
    for check in (accumulation_is_right, agree_after_a_step):
        worlds[size].run(check, accumulate_with_no_sync)
        failed = failures(worlds[size], check, wrong)
        assert len(failed) == size
    assert all("replicas differ" in said for said in failed.values())


def one_call_a_step(accumulate) -> None:
    calls, _ = no_sync_around_backward.count_calls(accumulate)
    assert calls == 1


def one_call_of_ours(accumulate) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    with CommLedger() as ledger:
        accumulate(model, torch.ones(4, 3, 4))
    assert len([e for e in ledger.events if e.op == "allreduce"]) == 1


@pytest.mark.verifies(DDP)
def test_torchs_no_sync_is_decided_in_forward(worlds):
    """The gradient is right in either case, so only the calls can show it."""
    inside = no_sync_around_backward.forward_inside
    around_backward = no_sync_around_backward.accumulate
    worlds[2].run(one_call_a_step, inside)
    assert len(failures(worlds[2], one_call_a_step, around_backward)) == 2
    for either in (inside, around_backward):  # ours looks in backward
        worlds[2].run(one_call_of_ours, either)


def train_joined(model, batches):
    with model.join():
        return runs_out_early.train(model, batches)


@pytest.mark.verifies(DDP, "xtrain.data_parallel.join:join")
def test_a_rank_that_runs_out_of_batches_is_shown(worlds):
    steps = worlds[3].run(runs_out_early.program, train_joined)
    assert steps == [3, 2, 1]
    with pytest.raises(RankTimeout) as caught:
        worlds[3].run(runs_out_early.program, runs_out_early.train, timeout=2)
    kinds = [report.kind for report in caught.value.reports]
    assert kinds == ["waiting", "waiting", "returned"]
    for report in caught.value.reports[:2]:
        assert "in wait (src/xtrain/comm/work.py" in report.summary
        assert "src/xtrain/comm/backward.py" in report.detail
        assert "src/xtrain/data_parallel/ddp.py" in report.detail
        assert "in _finish" in report.detail
        assert "in train" in report.detail


def sums_are_counted_once(accumulate, count) -> None:
    rank, size = ranks()
    layer = nn.Linear(1, 1, bias=False)
    accumulate(layer, torch.full((count, 1), 1.0 + 2 * rank))
    assert layer.weight.grad.item() == count * sum(1 + 2 * r for r in range(size))


def every_time_by_ddp(layer, batches):
    model = DistributedDataParallel(layer, gradient_reduction="sum")
    for batch in batches:
        model(batch).sum().backward()


def at_the_end_by_naive(layer, batches):
    model = NaiveDataParallel(layer, gradient_reduction="sum")
    for batch in batches:
        model(batch).sum().backward()
    model.reduce_gradients()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(DDP, NAIVE)
def test_what_was_summed_is_not_summed_again(worlds, size):
    wrong = reduced_every_time.accumulate
    worlds[size].run(sums_are_counted_once, wrong, 1)  # what hides it
    for count in (1, 2, 4):
        for right in (every_time_by_ddp, at_the_end_by_naive):
            worlds[size].run(sums_are_counted_once, right, count)
        if count > 1:
            all_fail(worlds[size], sums_are_counted_once, wrong, count)


def wrapped_gradients(data_parallel) -> None:
    rank, size = ranks()
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 1, bias=False).double(), torch.randn(size, 4, 3)
    before = model.weight.detach().clone()
    model = data_parallel(model) or model
    model(batches[rank].double()).sum().backward()
    bare = next(model.parameters())
    whole = batches.double().sum(1).mean(0, keepdim=True)
    assert torch.equal(bare.detach(), before), "backward changed the weights"
    torch.testing.assert_close(bare.grad, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(DDP)
def test_a_hook_that_takes_the_parameter_for_the_gradient(worlds, size):
    worlds[size].run(wrapped_gradients, DistributedDataParallel)
    wrong = hook_gets_the_parameter.data_parallel
    assert len(failures(worlds[size], wrapped_gradients, wrong)) == size
    worlds[1].run(wrapped_gradients, wrong)  # what hides it


class ByDDP:
    """The interface of the twin."""

    def __init__(self, module):
        self.model = DistributedDataParallel(module)

    def accumulate(self, batches):
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else self.model.no_sync():
                self.model(batch).sum().backward()


def all_micro_batches_count(data_parallel, count) -> None:
    rank, size = ranks()
    layer = nn.Linear(1, 1, bias=False)
    data_parallel(layer).accumulate(torch.full((count, 1), 1.0 + 2 * rank))
    mean = count * size  # of count times 1, 3, 5 ... over the ranks
    assert layer.weight.grad.item() == pytest.approx(mean)  # a third is not exact


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(DDP)
def test_a_hook_before_accumulation_needs_two_micro_batches(worlds, size):
    wrong = hook_before_accumulation.DataParallel
    worlds[size].run(all_micro_batches_count, wrong, 1)  # what hides it
    for count in (1, 2, 4):
        worlds[size].run(all_micro_batches_count, ByDDP, count)
    failed = failures(worlds[size], all_micro_batches_count, wrong, 2)
    assert {0, size - 1} <= failed.keys()  # a rank in the middle has the mean itself


def always_wrapped(model, dp, cp):
    return DistributedDataParallel(model)


def every_axis_alone(wrap, dp, cp) -> None:
    """Ranks of either axis have other data and must have the same weights."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, 1), dp, cp)
    torch.manual_seed(1 + rank)
    model(torch.randn(8, 4)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    check_replicas(model)


@pytest.mark.verifies(DDP, REPLICAS)
def test_each_axis_alone_must_sum_its_gradients(worlds):
    for axes in ((1, 2), (2, 1)):
        worlds[2].run(every_axis_alone, always_wrapped, *axes)
    worlds[2].run(every_axis_alone, only_if_dp.wrap, 2, 1)  # what hides it
    failed = failures(worlds[2], every_axis_alone, only_if_dp.wrap, 1, 2)
    assert all("replicas differ" in said for said in failed.values())
    assert failed.keys() == {0, 1}


# ------------------------------------------------------------------------- the memory


def add_up(model, batches, look):
    for batch in batches:
        model(batch).sum().backward()
        look([[p.grad for p in model.parameters()]])


def peak(accumulate, count):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    seen = []

    def look(stash):
        grads = [grad for grads in stash for grad in grads]
        seen.append(gradients_kept_apart.live_bytes(grads))

    accumulate(model, torch.ones(count, 2, 8), look)
    return max(seen), [p.grad for p in model.parameters()]


def peak_of_ddp(count):
    torch.manual_seed(0)
    bare = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    model, seen = DistributedDataParallel(bare), []
    for batch in torch.ones(count, 2, 8):
        with model.no_sync():
            model(batch).sum().backward()
        grads = [p.grad for p in bare.parameters()]
        seen.append(gradients_kept_apart.live_bytes(grads))
    return max(seen)


@pytest.mark.verifies(DDP)
def test_gradients_take_the_same_memory_for_any_number_of_micro_batches(worlds):
    one = 3 * 8 * 8 * 4
    for count in (1, 2, 8):
        held, right = peak(add_up, count)
        assert held == one
        held, wrong = peak(gradients_kept_apart.accumulate, count)
        assert held == count * one
        for a, b in zip(right, wrong, strict=True):  # it is right, and large
            torch.testing.assert_close(a, b)
        assert worlds[2].run(peak_of_ddp, count) == [one, one]


# --------------------------------------------------------------------------- the data


def orders_of(sampler, count):
    orders = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def epochs_differ(epochs) -> None:
    rank, size = ranks()
    sampler = DistributedSampler(range(40), size, rank)
    orders = epochs(sampler, 3)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.filterwarnings("ignore:a second pass")
@pytest.mark.verifies(SAMPLER)
def test_without_set_epoch_the_order_stays_the_same(worlds):
    worlds[2].run(epochs_differ, orders_of)
    all_fail(worlds[2], epochs_differ, same_order_every_epoch.epochs)


@pytest.mark.verifies(SAMPLER)
def test_our_sampler_warns_of_the_same_order():
    sampler = DistributedSampler(range(12), num_replicas=2, rank=0)
    with pytest.warns(UserWarning, match="a second pass over epoch 0"):
        same_order_every_epoch.epochs(sampler, 2)


def count_once(correct):
    """The first len(data) of what is dealt, in the order of dealing, are all of it."""
    rank, size = ranks()
    mine = list(DistributedSampler(correct, shuffle=False))
    kept = [i for turn, i in enumerate(mine) if turn * size + rank < len(correct)]
    counts = torch.tensor([sum(correct[i] for i in kept), len(kept)])
    dist.all_reduce(counts)
    return tuple(counts.tolist())


def accuracy_is_right(accuracy, size) -> None:
    correct = [i < 2 for i in range(size)]
    assert tuple(accuracy(correct)) == (2, size)


@pytest.mark.verifies(SAMPLER)
def test_padding_counted_needs_a_length_that_does_not_divide(worlds):
    wrong = padding_counted.accuracy
    worlds[4].run(accuracy_is_right, wrong, 8)  # what hides it
    for size in (8, 9, 10, 11):
        worlds[4].run(accuracy_is_right, count_once, size)
        if size > 8:
            all_fail(worlds[4], accuracy_is_right, wrong, size)
