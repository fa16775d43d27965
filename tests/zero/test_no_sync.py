"""What no_sync sends, keeps and forgets; that the gradients are right see elsewhere."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import batch_of, flat_groups, loss_of, make_model, pieces_of
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import DIRECT, TORCH
from xtrain.data_parallel import DistributedDataParallel
from xtrain.testing import expect_error
from xtrain.zero import AdamW, FullyShardedDataParallel, ZeroOptimizer

FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"
SCHEDULE = "xtrain.zero.fsdp_schedule:UnitSchedule"
STAGE_2 = "xtrain.zero.stage2:ReduceInBackward"
DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"


def spied(model):
    """The names of the collectives of a sharded model, as they are called."""
    calls = []
    for name in ("all_gather", "reduce_scatter"):
        original = getattr(TORCH, name)

        def spy(*tensors, group=None, name=name, original=original):
            calls.append(name)
            return original(*tensors, group=group)

        for group in flat_groups(model):
            changed = dataclasses.replace(group.collectives, **{name: spy})
            group.collectives = changed
    return calls


def what_is_sent(reshard):
    """Calls of three micro-batches inside, and of the reduction after them."""
    rank = dist.get_rank()
    bare = make_model(rank, dtype=torch.float32)
    model = FullyShardedDataParallel(
        bare, collectives=TORCH, reshard_after_forward=reshard
    )
    groups, calls = flat_groups(model), spied(model)
    with model.no_sync():
        losses = [loss_of(model, batch_of(0, micro, rank)) for micro in range(2)]
        for loss in losses:
            loss.backward()
        loss_of(model, batch_of(0, 2, rank)).backward()
    gathers = calls.count("all_gather"), len(groups)
    assert "reduce_scatter" not in calls
    assert all(p.grad is None for p in model.parameters())
    held = sum(group.full_grad.untyped_storage().nbytes() for group in groups)
    assert held == 4 * sum(group.layout.padded_numel for group in groups)
    calls.clear()
    model.reduce_gradients()
    assert calls == ["reduce_scatter"] * len(groups)
    assert all(group.full_grad is None for group in groups)
    assert not any(group.full.untyped_storage().nbytes() for group in groups)
    model.reduce_gradients()
    assert len(calls) == len(groups)
    return gathers


@pytest.mark.verifies(FSDP, SCHEDULE)
def test_nothing_is_reduced_inside_and_kept_weights_are_gathered_once(world):
    for gathers, groups in world(2).run(what_is_sent, False):
        assert gathers == groups
    for gathers, groups in world(2).run(what_is_sent, True):
        # The root's once; each block's in every forward and every backward.
        assert gathers == 1 + 3 * 2 * (groups - 1)


def wrapped(kind, bare, **options):
    """A wrapper of this kind, and the model to call."""
    options = {"collectives": TORCH, **options}
    if kind == "zero 2":
        options = {"optimizer_class": AdamW, "stage": 2, **options}
        return ZeroOptimizer(bare.parameters(), **options), bare
    wrap = FullyShardedDataParallel if kind == "fsdp" else DistributedDataParallel
    model = wrap(bare, **options)
    return model, model


def nested(kind):
    """Reductions in a backward inside both, inside one and outside."""
    wrapper, model = wrapped(kind, make_model(0, dtype=torch.float32))

    def reductions(micro):
        with CommLedger() as ledger:
            loss_of(model, batch_of(0, micro, dist.get_rank())).backward()
        return sum("reduce" in event.op for event in ledger.events)

    with wrapper.no_sync():
        with wrapper.no_sync():
            inner = reductions(0)
        outer = reductions(1)
    return inner, outer, reductions(2)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("ddp", marks=pytest.mark.verifies(DDP)),
        pytest.param("zero 2", marks=pytest.mark.verifies(STAGE_2)),
        pytest.param("fsdp", marks=pytest.mark.verifies(FSDP, SCHEDULE)),
    ],
)
def test_the_outer_no_sync_still_holds_when_an_inner_one_ends(world, kind):
    for inner, outer, outside in world(2).run(nested, kind):
        assert inner == outer == 0 < outside


class Branches(nn.Module):
    """Two blocks, of which each call uses one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)])

    def forward(self, x, number):
        return self.layers[number](x)


def sums_of_sixteen_bit():
    """256 + 1 + 1 + 1 + 1 = 260 has 8 bits; bf16 would round every sum to 256."""
    model = FullyShardedDataParallel(
        Branches(), compute_dtype=torch.bfloat16, gradient_reduction="average"
    )
    with model.no_sync():
        for factor in (256.0, 1.0, 1.0, 1.0, 1.0):
            (model(torch.ones(1, 3), 0) * factor).sum().backward()
    (model(torch.ones(1, 3), 1) * 7).sum().backward()  # leaves out the first block
    gradients = [p.grad.tolist() for p in model.parameters()]
    model.zero_grad()
    with model.no_sync():
        model(torch.ones(1, 3), 0).sum().backward()
    model.zero_grad()
    (model(torch.ones(1, 3), 1)).sum().backward()
    return gradients, [p.grad for p in model.parameters()]


@pytest.mark.verifies(FSDP, "xtrain.zero.flat_param_group:FlatParamGroup")
def test_sums_are_exact_reduced_when_their_block_rests_and_forgotten(world):
    results = world(2).run(sums_of_sixteen_bit)
    for (first, second), (forgotten, other) in results:
        assert set(first) <= {260.0}
        assert set(second) <= {7.0}
        assert forgotten is None
        assert set(other.tolist()) <= {1.0}
    assert sum(len(first) for (first, _), _ in results) == 3


def weights_changed_between(reshard):
    """A forward in no_sync whose backward never comes; then other weights."""
    model = FullyShardedDataParallel(
        make_model(0), reshard_after_forward=reshard, blocks=["layers.0", "layers.1"]
    )
    tokens = batch_of(0, 0, 0)
    with model.no_sync():
        left = loss_of(model, tokens)
    other = make_model(1)
    with torch.no_grad():
        whole = {name: p.flatten() for name, p in other.named_parameters()}
        for name, local, bounds in pieces_of(model):
            local.copy_(whole[name][bounds])
    other.scale.copy_(model.module.scale)
    with model.no_sync():
        found = loss_of(model, tokens)
    torch.testing.assert_close(found, loss_of(other, tokens))
    assert not torch.equal(found, left)


@pytest.mark.verifies(FSDP, SCHEDULE)
@pytest.mark.parametrize("reshard", [True, False])
def test_weights_of_an_earlier_no_sync_are_not_used_again(world, reshard):
    world(2).run(weights_changed_between, reshard)


def steps_inside_one_no_sync(reshard):
    """Two whole steps without leaving it, on the same batches on every rank."""
    model = FullyShardedDataParallel(make_model(0), reshard_after_forward=reshard)
    bare = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    reference = torch.optim.SGD(bare.parameters(), lr=0.02)
    with model.no_sync():
        for step in range(2):
            expected = loss_of(bare, batch_of(step, 0, 0))
            found = loss_of(model, batch_of(step, 0, 0))
            torch.testing.assert_close(found, expected)
            expected.backward()
            found.backward()
            model.reduce_gradients()
            full = [group.full.untyped_storage() for group in flat_groups(model)]
            assert not any(storage.nbytes() for storage in full)
            optimizer.step()
            reference.step()
            model.zero_grad()
            bare.zero_grad()


@pytest.mark.verifies(FSDP, SCHEDULE)
@pytest.mark.parametrize("reshard", [True, False])
def test_after_reduce_gradients_weights_may_change_also_inside(world, reshard):
    world(2).run(steps_inside_one_no_sync, reshard)


def forgotten_in_stage_2():
    """zero_grad inside and outside, and a whole gradient that was not reduced."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ZeroOptimizer([parameter], torch.optim.SGD, stage=2, lr=1.0)
    with optimizer.no_sync():
        parameter.sum().backward()
        assert parameter.grad is not None
    optimizer.zero_grad()
    optimizer.step()
    assert parameter.tolist() == [1.0] * 4
    with optimizer.no_sync(), optimizer.no_sync():
        parameter.sum().backward()
    optimizer.step()  # reduces
    assert parameter.grad is None
    assert parameter.tolist() == [0.0] * 4
    parameter.grad = torch.ones(4)
    optimizer.reduce_gradients()


@pytest.mark.verifies(STAGE_2)
def test_stage_2_forgets_what_no_sync_left_and_refuses_what_it_did_not(world):
    expect_error(
        world(2),
        forgotten_in_stage_2,
        error=RuntimeError,
        match="1 parameters have a whole gradient again",
    )


def after_a_failure(kind):
    """A backward that raises half-way on all ranks; then one that does not."""
    gradients = []
    for fails in (True, False):
        torch.manual_seed(0)
        bare = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        options = (
            {"blocks": ["1", "2"]} if kind == "fsdp" else {"bucket_cap_mb": 2**-14}
        )
        if kind == "ddp direct":
            options["collectives"] = DIRECT
        wrapper, model = wrapped(kind, bare, **options)
        if fails:
            handle = bare[1].register_forward_hook(fail_in_backward)
            with pytest.raises(RuntimeError, match="on purpose"):
                model(torch.ones(2, 4)).sum().backward()
            handle.remove()
            wrapper.zero_grad()
        model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        if kind == "zero 2":
            gradients.append(wrapper.gradients)
        else:
            gradients.append([p.grad for p in model.parameters()])
    for after, fresh in zip(*gradients, strict=True):
        assert torch.equal(after, fresh)
        assert not after.isnan().any()


def fail_in_backward(module, inputs, output):
    output.register_hook(fail)


def fail(_):
    raise RuntimeError("on purpose")


@pytest.mark.verifies("xtrain.comm.backward:Reducer", FSDP, SCHEDULE)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["ddp", "ddp direct", "zero 2", "fsdp"])
def test_a_failed_backward_leaves_nothing_behind(world, kind, size):
    world(size).run(after_a_failure, kind)
