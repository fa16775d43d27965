"""The classic bugs of lc3: broken twins fail the checks that the right code passes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from snippets.wrong.lc3 import (
    master_not_linked,
    muon_on_shards,
    no_gather_after_step,
    own_norm,
    scaled_twice,
    shards_before_tying,
    skips_alone,
    stale_weights,
    state_in_a_local,
    sums_in_bf16,
    tail_left_out,
    view_of_the_whole,
    zero_by_multiplying,
    zero_over_ddp,
)
from torch import Size, nn

from tests.snippets.gallery import all_fail, failures, ranks
from xtrain import zero
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import TORCH
from xtrain.data_parallel import DistributedDataParallel, check_replicas
from xtrain.testing import expect_error

ADAM = "xtrain.zero.adam:Adam"
MIXED = "xtrain.zero.mixed_precision:MixedPrecisionOptimizer"
SCALER = "xtrain.zero.mixed_precision:LossScaler"
ZERO = "xtrain.zero.optimizer:ZeroOptimizer"
FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"
LAYOUT = "xtrain.zero.flat:FlatLayout"
CLIP = "xtrain.zero.clip:clip_sharded_grad_norm_"
MUON = "xtrain.zero.muon:Muon"
REPLICAS = "xtrain.data_parallel.replicas:check_replicas"

# ---------------------------------------------------------------------- the optimizer


def equals_torch(optimizer_class, steps):
    mine, _ = state_in_a_local.train(optimizer_class, steps)
    theirs, _ = state_in_a_local.train(torch.optim.Adam, steps)
    return torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.verifies(ADAM)
def test_state_in_a_local_needs_two_steps_to_show():
    for steps in (1, 2, 10, 100):
        assert equals_torch(zero.Adam, steps)
        assert equals_torch(state_in_a_local.Adam, steps) == (steps == 1)


@pytest.mark.verifies(ADAM)
def test_state_in_a_local_is_still_zero():
    def moments_are_kept(optimizer, means):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return all(bool(mean.any()) for mean in means(optimizer))

    weight = nn.Parameter(torch.ones(3))
    wrong = state_in_a_local.Adam([weight], lr=0.1)
    assert not moments_are_kept(wrong, lambda o: o.means)
    right = zero.Adam([weight], lr=0.1)
    assert moments_are_kept(right, lambda o: [s["exp_avg"] for s in o.state.values()])


def weights_follow_masters(make) -> bool:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).bfloat16()
    optimizer, masters = make(layer.parameters())
    before = [p.detach().clone() for p in layer.parameters()]
    layer(torch.ones(1, 3, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    for master, old in zip(masters, before, strict=True):
        assert not torch.equal(master, old.float())  # the masters move in any case
    return all(
        torch.equal(parameter, master.to(parameter.dtype))
        for parameter, master in zip(layer.parameters(), masters, strict=True)
    )


def make_linked(parameters):
    mixed = zero.MixedPrecisionOptimizer(parameters, torch.optim.SGD, lr=0.5)
    return mixed, [master for _, master in mixed.pairs]


def make_unlinked(parameters):
    mixed = master_not_linked.MixedPrecision(parameters, torch.optim.SGD, lr=0.5)
    return mixed, mixed.masters


@pytest.mark.verifies(MIXED)
def test_masters_that_are_not_linked():
    assert weights_follow_masters(make_linked)
    assert not weights_follow_masters(make_unlinked)


def is_the_sum_of(accumulate, micro_batches) -> bool:
    """Against float64; what is rounded once is off by 1/256 at most."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1, bias=False).bfloat16()
    batches = [torch.rand(1, 3).bfloat16() for _ in range(micro_batches)]
    total = torch.stack(batches).double().sum(0)
    return torch.allclose(accumulate(layer, batches).double(), total, rtol=2**-8)


def accumulate_for_masters(layer, batches):
    zero.MixedPrecisionOptimizer(layer.parameters(), torch.optim.SGD, lr=0.5)
    return sums_in_bf16.accumulate(layer, batches)


@pytest.mark.verifies("xtrain.comm.main_grad:unround")
def test_sums_in_bf16_stop_growing():
    assert is_the_sum_of(accumulate_for_masters, 1000)
    assert not is_the_sum_of(sums_in_bf16.accumulate, 1000)
    # two are rounded once
    assert is_the_sum_of(sums_in_bf16.accumulate, 2)


# ---------------------------------------------------------------------- the loss scale


def unscale_by_ours(gradient):
    gradient = gradient.float()
    assert zero.LossScaler(init_scale=scaled_twice.SCALE).unscale([gradient])
    return gradient


def unscaled_is_the_gradient(unscale) -> bool:
    gradient = torch.tensor([2.0, -3.0])
    return torch.equal(unscale(gradient * scaled_twice.SCALE), gradient)


@pytest.mark.verifies(SCALER)
def test_a_gradient_that_was_scaled_twice_hides_behind_adam_and_clipping():
    wrong = scaled_twice.unscale
    assert unscaled_is_the_gradient(unscale_by_ours)
    assert not unscaled_is_the_gradient(wrong)
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    for unscale in (unscale_by_ours, wrong):  # what hides it
        assert scaled_twice.train(adam, unscale) == pytest.approx(0.7016, abs=1e-4)
        assert scaled_twice.train(sgd, unscale, 1.0) == pytest.approx(0.7879, abs=1e-4)
    assert scaled_twice.train(sgd, unscale_by_ours) == pytest.approx(0.512)
    assert abs(scaled_twice.train(sgd, wrong)) > 1e9


def all_decide_alike(make_scaler, bad_rank) -> None:
    rank, size = ranks()
    scaler = make_scaler(8.0)
    gradient = torch.ones(2)
    if rank == bad_rank:
        gradient[0] = float("inf")
    finite = scaler.unscale([gradient])
    if isinstance(scaler, zero.LossScaler):
        scaler.update(finite)
    expected = (bad_rank >= size, 8.0 if bad_rank >= size else 4.0)
    assert (finite, scaler.scale) == expected


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(SCALER)
def test_an_overflow_on_one_rank_skips_the_step_of_all(worlds, size):
    for bad_rank in (0, size - 1, size):
        worlds[size].run(all_decide_alike, zero.LossScaler, bad_rank)
    wrong = skips_alone.Scaler
    worlds[size].run(all_decide_alike, wrong, size)  # what hides it: no overflow
    failed = failures(worlds[size], all_decide_alike, wrong, 1)
    assert failed.keys() == set(range(size)) - {1}


def forget_by_ours(parameters):
    zero.MixedPrecisionOptimizer(parameters, torch.optim.SGD, lr=1.0).zero_grad()


@pytest.mark.verifies(MIXED)
def test_a_nan_times_zero_stays():
    for right in (forget_by_ours, zero_by_multiplying.set_to_none):
        taken, _ = zero_by_multiplying.train(right, 5)
        assert taken == ["taken", "skipped", "taken", "taken", "taken"]
    taken, gradient = zero_by_multiplying.train(zero_by_multiplying.zero_grad, 5)
    assert taken == ["taken", *["skipped"] * 4]
    assert bool(torch.isnan(gradient).all())
    taken, _ = zero_by_multiplying.train(zero_by_multiplying.zero_grad, 1)
    assert taken == ["taken"]  # what hides it: no overflow


# ------------------------------------------------------------------------- the memory


def shard_by_zero(stage, gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    optimizer = zero.ZeroOptimizer(
        [parameter], torch.optim.SGD, stage, gradient_reduction="sum", lr=1.0
    )
    (parameter * gradient).sum().backward()
    (shard,) = optimizer.gradients
    assert parameter.grad is None
    return shard


def shard_keeps_nothing_else_alive(my_shard) -> None:
    rank, size = ranks()
    gradient = torch.arange(64.0 * size) + rank
    shard = my_shard(gradient)
    whole = torch.arange(64.0 * size) * size + size * (size - 1) / 2
    assert torch.equal(shard, whole.chunk(size)[rank])
    assert shard.untyped_storage().nbytes() == 64 * 4


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(ZERO, "xtrain.zero.buckets:ShardedBucket")
def test_a_view_keeps_the_whole_gradient_alive(worlds, size):
    for stage in (1, 2):
        right = partial(shard_by_zero, stage)
        worlds[size].run(shard_keeps_nothing_else_alive, right)
    wrong = view_of_the_whole.my_shard
    all_fail(worlds[size], shard_keeps_nothing_else_alive, wrong)
    worlds[1].run(shard_keeps_nothing_else_alive, wrong)  # what hides it


def zero_over_our_ddp(stage) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    zero.ZeroOptimizer(model.parameters(), zero.AdamW, stage=stage)


def zero_twice() -> None:
    model = nn.Linear(2, 2)
    for _ in range(2):
        zero.ZeroOptimizer(model.parameters(), zero.AdamW, stage=2)


def zero_over_torchs_ddp() -> None:
    model, optimizer = zero_over_ddp.build(nn.parallel.DistributedDataParallel)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()


def zero_over_a_bare_module() -> None:
    model, optimizer = zero_over_ddp.build(nn.Sequential)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()


@pytest.mark.verifies(ZERO, "xtrain.comm.wrapper_rules:check_bare")
def test_zero_over_another_data_parallelism_is_refused(worlds):
    worlds[2].run(zero_over_a_bare_module)
    for check, error, match in (
        (partial(zero_over_our_ddp, 1), ValueError, "DistributedDataParallel reduces"),
        (partial(zero_over_our_ddp, 2), ValueError, "DistributedDataParallel reduces"),
        (zero_twice, ValueError, "ZeroOptimizer reduces the"),
        (zero_over_torchs_ddp, RuntimeError, "1 parameters have a whole gradient"),
    ):
        expect_error(worlds[2], check, error=error, match=match)


def stage_1(wrapper) -> tuple[set[str], torch.Tensor]:
    """What a step calls, and the weights after it."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model = wrapper(nn.Linear(8, 8, bias=False))
    optimizer = zero.ZeroOptimizer(
        model.parameters(), torch.optim.SGD, collectives=TORCH, lr=0.1
    )
    with CommLedger() as ledger:
        model(torch.full((1, 8), 1.0 + rank)).square().sum().backward()
        optimizer.step()
    calls = {event.op.replace("_", "") for event in ledger.events}
    names = ("allreduce", "reducescatter", "allgather")
    called = {name for name in names if any(name in call for call in calls)}
    return called, next(model.parameters()).detach().clone()


def test_stage_1_over_torchs_ddp_is_right_and_reduces_twice(worlds):
    bare = worlds[2].run(stage_1, nn.Sequential)
    wrapped = worlds[2].run(stage_1, nn.parallel.DistributedDataParallel)
    for (calls, weights), (more, same) in zip(bare, wrapped, strict=True):
        assert more - calls == {"allreduce"}
        assert calls == {"reducescatter", "allgather"}
        torch.testing.assert_close(same, weights)


# ------------------------------------------------------------------------- the shards


def step_by_zero(weights, gradients, lr):
    parameter = nn.Parameter(weights.clone())
    optimizer = zero.ZeroOptimizer([parameter], torch.optim.SGD, lr=lr)
    parameter.grad = gradients.clone()
    optimizer.step()
    weights.copy_(parameter.detach())


def every_weight_moves(step, count) -> None:
    weights = torch.arange(float(count))
    step(weights, torch.ones(count), lr=0.5)
    assert torch.equal(weights, torch.arange(float(count)) - 0.5)


@pytest.mark.verifies(ZERO, LAYOUT)
def test_a_tail_needs_a_length_that_does_not_divide(worlds):
    wrong = tail_left_out.step
    for count in (6, 7, 11, 13):
        worlds[3].run(every_weight_moves, step_by_zero, count)
    worlds[3].run(every_weight_moves, wrong, 6)  # what hides it
    for count in (7, 11):
        all_fail(worlds[3], every_weight_moves, wrong, count)


@pytest.mark.verifies(LAYOUT)
def test_shards_cover_lengths_that_do_not_divide():
    for count, size in ((7, 3), (1, 4), (13, 8)):
        layout = zero.FlatLayout([Size([count])], size)
        assert layout.shard_numel * size == layout.padded_numel >= count


def step_of_ours(weight, lr):
    optimizer = zero.ZeroOptimizer([weight], torch.optim.SGD, lr=lr)
    optimizer.step()


def agree_after(step) -> None:
    rank, _ = ranks()
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, bias=False)
    torch.manual_seed(1 + rank)
    layer(torch.randn(3, 4)).sum().backward()
    step(layer.weight, lr=0.5)
    check_replicas(layer)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.verifies(ZERO, REPLICAS)
def test_a_step_without_the_gather_is_named(worlds, size):
    worlds[size].run(agree_after, step_of_ours)
    failed = failures(worlds[size], agree_after, no_gather_after_step.step)
    assert len(failed) == size
    assert all("replicas differ in 1 of 1 par" in said for said in failed.values())
    worlds[1].run(agree_after, no_gather_after_step.step)  # what hides it


class ByFsdp:
    """The interface of the twin."""

    def __init__(self, weights):
        layer = nn.Linear(4, 1, bias=False)
        layer.weight.data.copy_(weights)
        self.model = zero.FullyShardedDataParallel(layer)

    def losses(self, data, steps):
        losses = []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _step in range(steps):
            loss = (self.model(data).flatten() - data.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


class ByTwin:
    def __init__(self, weights):
        self.layer = stale_weights.ShardedLinear(weights)

    def losses(self, data, steps):
        return stale_weights.train(self.layer, data, steps)


def loss_follows_the_weights(make) -> None:
    rank, size = ranks()
    torch.manual_seed(0)
    data = torch.randn(size, 16, 4)
    found = make(torch.zeros(4)).losses(data[rank], 4)
    weight = nn.Parameter(torch.zeros(4))
    for loss in found:  # one process
        mine = (data[rank] @ weight - data[rank].sum(1)).square().mean()
        assert loss == pytest.approx(mine.item(), rel=1e-5)
        (
            (data.flatten(0, 1) @ weight) - data.sum(2).flatten()
        ).square().mean().backward()
        weight.data.sub_(0.1 * weight.grad)
        weight.grad = None


@pytest.mark.verifies(FSDP, "xtrain.zero.flat_param_group:FlatParamGroup")
def test_weights_gathered_before_the_step_are_old(worlds):
    worlds[2].run(loss_follows_the_weights, ByFsdp)
    all_fail(worlds[2], loss_follows_the_weights, ByTwin)


def clipping_is_one_processs(clip, gradient) -> None:
    rank, size = ranks()
    whole = nn.Parameter(torch.zeros_like(gradient))
    whole.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_([whole], 1.0)
    shard = gradient.chunk(size)[rank].clone()
    found = clip([shard], 1.0)
    torch.testing.assert_close(shard, whole.grad.chunk(size)[rank])
    assert found.item() == pytest.approx(norm.item())


@pytest.mark.verifies(CLIP)
def test_the_norm_of_a_part_clips_by_the_number_of_ranks(worlds):
    gradient = torch.tensor([3.0, 0.0, 4.0, 0.0, 0.0, 0.0, 12.0, 0.0])
    for size in (1, 2, 4):
        worlds[size].run(
            clipping_is_one_processs, zero.clip_sharded_grad_norm_, gradient
        )
    worlds[1].run(clipping_is_one_processs, own_norm.clip, gradient)  # what hides it
    for size in (2, 4):
        all_fail(worlds[size], clipping_is_one_processs, own_norm.clip, gradient)


def tie_then_shard(gradients, stage, data_group, tied_group):
    """The tied gradient is added across stages while every rank has it whole."""
    dist.all_reduce(gradients["tied"], group=tied_group)
    names = shards_before_tying.PARTS[stage]
    layout = zero.FlatLayout([gradients[name].shape for name in names], 2)
    flat = torch.zeros(layout.padded_numel)
    for view, name in zip(layout.views(flat), names, strict=True):
        view.copy_(gradients[name])
    shard = torch.empty(layout.shard_numel)
    TORCH.reduce_scatter(shard, flat, group=data_group).wait()
    return shard / 2


def tied_parts_are_added(reduce) -> None:
    stage, data_rank, data_group, tied_group = shards_before_tying.place()
    names = shards_before_tying.PARTS[stage]
    inner, tied = torch.full((2,), 100.0 * (stage + 1)), torch.full((2,), 10.0**stage)
    shard = reduce({"tied": tied, "inner": inner}, stage, data_group, tied_group)
    held = names[data_rank]
    expected = torch.full((2,), 11.0) if held == "tied" else inner
    assert torch.equal(shard, expected)


def tied_by_zero() -> None:
    """ZeRO-1 with the tied gradient added before its step."""
    stage, data_rank, data_group, tied_group = shards_before_tying.place()
    tied, inner = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = zero.ZeroOptimizer(
        [tied, inner] if stage == 0 else [inner, tied],
        torch.optim.SGD,
        process_group=data_group,
        lr=1.0,
    )
    (tied.sum() * 10.0**stage + inner.sum() * (stage + data_rank)).backward()
    dist.all_reduce(tied.grad, group=tied_group)
    optimizer.step()
    assert tied.tolist() == [-11.0, -11.0]
    assert inner.tolist() == [-(stage + 0.5)] * 3


@pytest.mark.verifies(ZERO, LAYOUT)
def test_tied_parts_are_added_before_they_are_cut(worlds):
    worlds[4].run(tied_parts_are_added, tie_then_shard)
    worlds[4].run(tied_by_zero)
    all_fail(worlds[4], tied_parts_are_added, shards_before_tying.reduce)


def by_muon(shards):
    """What the optimizer of FSDP adds to this rank's piece of a matrix."""
    whole = torch.cat(shards)
    model = zero.FullyShardedDataParallel(nn.ParameterList([torch.zeros_like(whole)]))
    (piece,) = model.parameters()
    rank, size = ranks()
    piece.grad = whole.flatten().chunk(size)[rank].clone()
    options = {"lr": 1.0, "momentum": 0.0, "ns_dtype": whole.dtype}
    zero.Muon.of(model, **options).step()
    return [-rows for rows in piece.view(-1, whole.shape[1])]


def by_the_broken_form(shards):
    return list(muon_on_shards.updates(shards)[ranks()[0]].to(shards[0].dtype))


def update_is_one_processs(update) -> None:
    rank, size = ranks()
    generator = torch.Generator().manual_seed(0)
    momentum = torch.randn(8, 8, generator=generator, dtype=torch.float64) + 3
    expected = zero.newton_schulz(momentum, dtype=torch.float64).chunk(size)[rank]
    found = torch.stack(update(momentum.chunk(size)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@pytest.mark.verifies(MUON)
def test_muon_on_shards_depends_on_the_number_of_ranks(worlds):
    for size in (1, 2, 4):
        worlds[size].run(update_is_one_processs, by_muon)
    worlds[1].run(update_is_one_processs, by_the_broken_form)  # what hides it
    for size in (2, 4):
        all_fail(worlds[size], update_is_one_processs, by_the_broken_form)
