"""Gradients of 16-bit parameters add up in fp32, under every wrapper and the runner.

300 equal gradients of 1 add up to 256 in bf16: 256 + 1 rounds to 256.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm.main_grad import (
    accumulate_in_fp32,
    leave_gradient,
    read_in_fp32,
    unround,
)
from xtrain.data_parallel import DistributedDataParallel
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.plan import RECIPES
from xtrain.schedules import one_f_one_b
from xtrain.zero import FullyShardedDataParallel, MixedPrecisionOptimizer, ZeroOptimizer

MAIN_GRAD = "xtrain.comm.main_grad"
MANY, STALLED = 300, 256.0


class Scaled(nn.Module):
    """y = w x: the gradient of w is the sum of the rows of x."""

    def __init__(self, dtype=torch.bfloat16, size=5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x):
        return x * self.weight


def a_row(rank=0, dtype=torch.bfloat16):
    return torch.full((1, 5), 1.0 + rank, dtype=dtype)


def backwards(model, times, rank=0, dtype=torch.bfloat16):
    for _ in range(times):
        model(a_row(rank, dtype)).sum().backward()


@pytest.mark.verifies(
    f"{MAIN_GRAD}:accumulate_in_fp32",
    f"{MAIN_GRAD}:before_adding",
    f"{MAIN_GRAD}:unround",
)
def test_gradients_of_many_backwards_grow():
    stalls, grows = Scaled(), Scaled()
    accumulate_in_fp32(grows.parameters())
    backwards(stalls, MANY)
    backwards(grows, MANY)
    assert stalls.weight.grad.tolist() == [STALLED] * 5
    assert grows.weight.grad.tolist() == [MANY] * 5
    grows.zero_grad()
    backwards(grows, 1)
    assert grows.weight.grad.dtype == torch.bfloat16  # nothing was added yet


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_parameters_are_left_alone(dtype):
    model = Scaled(dtype)
    accumulate_in_fp32(model.parameters(), True)
    assert not model.weight._backward_hooks
    assert model.weight.grad_dtype == dtype


@pytest.mark.verifies(f"{MAIN_GRAD}:leave_gradient")
def test_a_sum_is_rounded_once_and_goes_on_unrounded():
    weight = Scaled().weight
    accumulate_in_fp32([weight])
    total = torch.full((5,), 257.0)
    leave_gradient(weight, total)
    assert weight.grad.tolist() == [256.0] * 5
    assert weight.grad.dtype == torch.bfloat16
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [259.0] * 5
    leave_gradient(weight, weight.grad)
    weight.grad.mul_(0.5)  # clipped: what was written is what counts
    assert unround(weight).tolist() == [130.0] * 5
    weight.grad = None
    assert unround(weight) is None


@pytest.mark.verifies(f"{MAIN_GRAD}:read_in_fp32")
def test_masters_read_what_was_not_rounded():
    model = Scaled()
    optimizer = MixedPrecisionOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    backwards(model, 257)
    optimizer.step()
    assert optimizer.pairs[0][1].tolist() == [1.0 - 257] * 5


def bytes_of_gradients(weight):
    total, _ = getattr(weight.grad, "_before_rounding", (None, 0))
    held = [weight.grad] if total is None else [weight.grad, total]
    return sum(t.untyped_storage().nbytes() for t in held) / weight.numel()


def test_bytes_are_those_of_the_recipes():
    model = Scaled()
    accumulate_in_fp32(model.parameters())
    backwards(model, 1)
    assert bytes_of_gradients(model.weight) == RECIPES["zero16"].gradients
    backwards(model, 1)
    assert bytes_of_gradients(model.weight) == RECIPES["megatron18"].gradients
    leave_gradient(model.weight, model.weight.grad)
    assert bytes_of_gradients(model.weight) == RECIPES["fp32_accum20"].gradients
    read_in_fp32(model.parameters())
    leave_gradient(model.weight, unround(model.weight))
    assert bytes_of_gradients(model.weight) == RECIPES["megatron18"].gradients


def under_ddp():
    """What is added up under DDP, here and over the ranks, on and off."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Scaled(), gradient_reduction="sum")
    weight = model.module.weight
    with model.no_sync():
        backwards(model, MANY - 1, rank)
    backwards(model, 1, rank)
    assert weight.grad.dtype == torch.bfloat16
    accumulated = unround(weight).clone()

    model = DistributedDataParallel(Scaled())
    optimizer = torch.optim.AdamW(model.parameters())
    backwards(model, MANY, 0)  # each is reduced, and none is forgotten
    optimizer.step()
    reduced = unround(model.module.weight).clone()

    bare = Scaled()
    model = DistributedDataParallel(bare)
    optimizer = MixedPrecisionOptimizer(bare.parameters(), torch.optim.SGD, lr=1.0)
    with model.no_sync():
        backwards(model, 256, 0)
    backwards(model, 1, 0)
    optimizer.step()
    (_, master) = optimizer.pairs[0]

    off = DistributedDataParallel(Scaled(), fp32_gradients=False)
    with off.no_sync():
        backwards(off, MANY, 0)
    off.reduce_gradients()
    return accumulated, reduced, master.detach(), off.module.weight.grad


@pytest.mark.verifies("xtrain.data_parallel.ddp:DistributedDataParallel")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_grow_under_ddp(world, size):
    for accumulated, reduced, master, off in world(size).run(under_ddp):
        assert accumulated.tolist() == [MANY * sum(range(1, size + 1))] * 5
        assert reduced.tolist() == [float(MANY)] * 5
        assert master.tolist() == [1.0 - 257] * 5
        assert off.tolist() == [STALLED] * 5


def under_zero(stage, masters):
    """The gradient of the own shard of ten in all, summed over the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def shard(sync, **options):
        model = Scaled(size=5)
        optimizer = ZeroOptimizer(
            model.parameters(),
            torch.optim.SGD,
            stage=stage,
            lr=1.0,
            master_weights=masters,
            gradient_reduction="sum",
            **options,
        )
        if sync:
            backwards(model, MANY, rank)
        else:
            with optimizer.no_sync():
                backwards(model, MANY, rank)
        optimizer.reduce_gradients()
        (bucket,) = optimizer.buckets
        optimizer.step()
        owned = min(5 - rank * -(-5 // size), -(-5 // size))
        grad = unround(bucket.master)[:owned].clone()
        return grad.double().tolist()

    off = shard(False, fp32_gradients=False) if rank == 0 and size == 1 else None
    return shard(False), shard(True), off


@pytest.mark.verifies(
    "xtrain.zero.optimizer:ZeroOptimizer", f"{MAIN_GRAD}:add_to_gradient"
)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_sums_grow_under_zero(world, stage, size):
    ranks = sum(range(1, size + 1))
    for masters in (True, False):
        for local, reduced, off in world(size).run(under_zero, stage, masters):
            assert local == [MANY * ranks] * len(local)
            assert reduced == [MANY * ranks] * len(reduced)
            if off is not None:
                assert off == [STALLED] * len(off)


def under_fsdp():
    """Pieces of gradients: from inside no_sync, and of MANY reductions."""
    rank = dist.get_rank()
    local = FullyShardedDataParallel(Scaled(), gradient_reduction="sum")
    with local.no_sync():
        backwards(local, MANY, rank)
    local.reduce_gradients()
    often = FullyShardedDataParallel(Scaled(), gradient_reduction="sum")
    optimizer = torch.optim.AdamW(often.parameters())
    backwards(often, MANY, rank)
    optimizer.step()
    reduced = unround(often.module.weight).clone()
    off = FullyShardedDataParallel(
        Scaled(), gradient_reduction="sum", fp32_gradients=False
    )
    backwards(off, MANY, 0)
    return unround(local.module.weight), reduced, off.module.weight.grad


@pytest.mark.verifies("xtrain.zero.flat_param_group:FlatParamGroup")
@pytest.mark.parametrize("size", [1, 2])
def test_sums_grow_under_fsdp(world, size):
    ranks = sum(range(1, size + 1))
    for local, reduced, off in world(size).run(under_fsdp):
        assert local.tolist() == [MANY * ranks] * len(local)
        assert reduced.tolist() == [MANY * ranks] * len(reduced)
        assert off.tolist() == [size * STALLED] * len(off)


def sum_of_rows(output, _):
    return output.sum(), output.shape[0]


def through_the_runner(dtype, value, wrapped, choice):
    """The gradient of a step of MANY micro-batches, and of that and one more step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module, group = Scaled(dtype), None
    if wrapped:  # every rank has the same stages and brings its batch
        module = DistributedDataParallel(module, gradient_reduction="sum")
        group = dist.group.WORLD
    pipeline = (
        dist.new_group([rank], use_local_synchronization=True) if wrapped else None
    )
    ranks = 1 if wrapped else size
    stage = PipelineStage(module, 0 if wrapped else rank, ranks)
    schedule = one_f_one_b(ranks, MANY)
    runner = PipelineRunner(
        stage, schedule, sum_of_rows, pipeline, data_group=group, fp32_gradients=choice
    )
    rows = torch.full((MANY, 5), value, dtype=dtype)
    (weight,) = module.parameters()
    runner.step(rows, rows)
    once = unround(weight).clone() if choice is None else weight.grad.clone()
    runner.step(rows, rows)
    return once, weight.grad


@pytest.mark.verifies(
    "xtrain.pipeline_parallel.gradients:PreviousGradients",
    "xtrain.pipeline_parallel.runner:PipelineRunner",
)
def test_sums_grow_in_a_pipeline(world):
    for size, wrapped in ((1, False), (2, False), (2, True)):
        runs = world(size).run(through_the_runner, torch.bfloat16, 1.0, wrapped, None)
        for once, twice in runs:
            assert once.tolist() == [1.0] * 5
            assert twice.tolist() == [2.0] * 5
            assert twice.dtype == torch.bfloat16
    for once, _ in world(1).run(through_the_runner, torch.bfloat16, 1.0, False, False):
        assert once.tolist() == [0.8515625] * 5  # 256 / 300


def test_sums_of_tokens_pass_the_range_of_fp16(world):
    """300 times 250 is beyond 65504, their mean is not."""
    half = torch.float16
    for once, _ in world(1).run(through_the_runner, half, 250.0, False, None):
        assert once.tolist() == [250.0] * 5
    for once, _ in world(1).run(through_the_runner, half, 250.0, False, False):
        assert once.isinf().all()
