"""Stages 1 and 2: equal to one process, to the byte what the formula says."""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import (
    adamw,
    batch_of,
    largest_difference,
    loss_of,
    make_model,
    reference,
    storages,
)
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import RING, collectives_named
from xtrain.plan import state_memory
from xtrain.zero import (
    AdamW,
    FullyShardedDataParallel,
    LossScaler,
    ZeroOptimizer,
    clip_sharded_grad_norm_,
)
from xtrain.zero.buckets import split_parameters

FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"
STEPS = 20
TINY = 2**-10  # MiB: every bucket holds a parameter or two
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


def own_model(rank, frozen=False, dtype=torch.float64):
    """Weights of its own on every rank; buffers, which are the caller's, of rank 0."""
    model = make_model(100 + rank if rank else 0, frozen, dtype)
    model.scale.copy_(make_model(0, frozen, dtype).scale)
    return model


def train(stage, reduction, micro_batches, frozen, choice, cap, max_norm, offload):
    rank = dist.get_rank()
    model = own_model(rank, frozen)
    optimizer = ZeroOptimizer(
        model.parameters(),
        AdamW if choice == "ring" else torch.optim.AdamW,
        stage=stage,
        bucket_cap_mb=cap,
        gradient_reduction=reduction,
        collectives=collectives_named(choice),
        offload=offload,
        **OPTIONS,
    )
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss_of(model, batch_of(step, micro, rank)).backward()
        if max_norm:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_twenty_steps_equal_one_process(world, size):
    cases = [
        (1, "average", 1, False, "torch", 25, None, False),
        (1, "sum", 2, True, "ring", TINY, 3.0, False),
        (2, "average", 2, True, "torch", TINY, 3.0, True),
        (2, "sum", 1, False, "ring", 25, None, False),
    ]
    for case in cases if size < 8 else cases[2:]:
        _, reduction, micro_batches, frozen, _, _, max_norm, _ = case
        expected = reference(
            size, STEPS, micro_batches, reduction == "average", frozen, max_norm
        )
        results = world(size).run(train, *case)
        for result in results:
            assert largest_difference(result, expected) < 1e-12, case
            assert largest_difference(result, results[0]) == 0.0, case


def measure(stage, dtype):
    """(measured, computed) bytes of weights, gradients and optimizer state."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = own_model(rank, dtype=dtype)
    optimizer = ZeroOptimizer(model.parameters(), AdamW, stage=stage, **OPTIONS)
    parameters = sum(p.numel() for p in model.parameters())
    assert len(optimizer.buckets) == 1
    measured, peak = [], []
    for _ in range(2):
        loss_of(model, batch_of(0, 0, rank)).backward()
        measured.append(
            (storages(model.parameters()), storages(grads_of(model, optimizer)))
        )
        optimizer.step()
        optimizer.zero_grad()
        peak.append(storages(grads_of(model, optimizer)))
    assert peak == [0, 0]
    assert measured[0] == measured[1]
    state = [t for s in optimizer.optimizer.state.values() for t in s.values()]
    masters = [b.master for b in optimizer.buckets if b.owns_copy]
    cut = storages(t for t in [*state, *masters] if t.dim())
    numbers = [t for t in state if not t.dim()]
    assert len(numbers) == 1  # one step count a bucket, which no formula counts
    return (*measured[0], cut), parameters, size


def grads_of(model, optimizer):
    grads = [p.grad for p in model.parameters()]
    grads += [b.master.grad for b in optimizer.buckets]
    grads += [b.full_grad for b in optimizer.buckets]
    return [g for g in grads if g is not None]


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_bytes_per_rank_equal_the_formula(world, size):
    """Padding is part of the formula. Sharded 16-bit gradients are summed in fp32."""
    for stage, dtype, recipe in (
        (1, torch.float32, "fp32"),
        (2, torch.float32, "fp32"),
        (1, torch.bfloat16, "zero16"),
        (2, torch.bfloat16, "megatron18"),
    ):
        for found, parameters, ranks in world(size).run(measure, stage, dtype):
            expected = state_memory(parameters, ranks, stage, recipe)
            weights, gradients, optimizer = found
            padding = -parameters % ranks * dtype.itemsize  # of the flat weights
            assert weights == expected.weights + padding
            assert gradients == expected.gradients
            assert optimizer == expected.optimizer


def traffic(stage, micro_batches, inside):
    """Bytes of a step whose first micro-batches are `inside` no_sync."""
    rank = dist.get_rank()
    model = own_model(rank, dtype=torch.float32)
    optimizer = ZeroOptimizer(
        model.parameters(), AdamW, stage=stage, collectives=RING, bucket_cap_mb=TINY
    )
    padded = sum(bucket.layout.padded_numel for bucket in optimizer.buckets)
    assert padded >= sum(p.numel() for p in model.parameters())
    with CommLedger() as ledger:
        for micro in range(micro_batches):
            local = optimizer.no_sync() if micro < inside else contextlib.nullcontext()
            with local:
                loss_of(model, batch_of(0, micro, rank)).backward()
        optimizer.step()
    return ledger.bytes_sent, ledger.bytes_received, 4 * padded


@pytest.mark.verifies(
    "xtrain.zero.optimizer:ZeroOptimizer", "xtrain.zero.buckets:gather_weights"
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_payload_is_a_reduce_scatter_and_an_all_gather(world, size):
    """Twice (N-1)/N of the parameters; in stage 2 a reduce-scatter a micro-batch.

    Unless those before the last, or all of them, are in no_sync.
    """
    cases = [(1, 1, 0, 2), (2, 1, 0, 2), (1, 3, 0, 2), (2, 3, 0, 4)]
    for *case, passes in [*cases, (2, 3, 2, 2), (2, 3, 3, 2)]:
        for sent, received, phi in world(size).run(traffic, *case):
            assert sent * size == received * size == passes * (size - 1) * phi, case


def live_gradients(stage):
    """The most bytes of full gradients that were alive at any hook of a backward."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)])
    each = 64 * 64 * 4
    optimizer = ZeroOptimizer(
        model.parameters(), AdamW, stage=stage, bucket_cap_mb=each / 2**20
    )
    peak = 0

    def look(_):
        nonlocal peak
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        grads += [b.full_grad for b in optimizer.buckets if b.full_grad is not None]
        peak = max(peak, storages(grads))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    torch.manual_seed(rank)
    model(torch.randn(2, 64)).square().sum().backward()
    left = storages(grads_of(model, optimizer))
    return peak / each, left / each


@pytest.mark.verifies(
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.stage1:ReduceAtStep",
    "xtrain.zero.stage1:take_shard",
    "xtrain.zero.stage2:ReduceInBackward",
)
def test_stage_2_frees_full_gradients_during_backward(world):
    size = 2
    for peak, left in world(size).run(live_gradients, 1):
        assert (peak, left) == (12, 12)
    for peak, left in world(size).run(live_gradients, 2):
        assert peak <= 3  # one complete, one on its way, one that arrives
        assert left == 12 / size


def masters(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    parameter = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = ZeroOptimizer(
        [parameter], torch.optim.SGD, stage=2, lr=0.001, gradient_reduction="sum"
    )
    for _ in range(100):
        (parameter.sum() / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    without = nn.Parameter(torch.ones(5, dtype=dtype))
    plain = ZeroOptimizer(
        [without], torch.optim.SGD, stage=1, lr=0.001, master_weights=False
    )
    for _ in range(100):
        without.sum().backward()
        plain.step()
        plain.zero_grad()
    held = optimizer.buckets[0]
    mine = max(0, min(5 - rank * held.layout.shard_numel, held.layout.shard_numel))
    return parameter.tolist(), without.tolist(), held.master[:mine].tolist()


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
def test_masters_add_up_what_bf16_would_lose(world):
    for weights, without, master in world(2).run(masters, torch.bfloat16):
        assert weights == pytest.approx([0.9] * 5, abs=0.004)
        assert without == [1.0] * 5
        assert master == pytest.approx([0.9] * len(master), abs=1e-5)


def scaled_fp16():
    """A scaler over the shards: an overflow in one rank's shard is everyone's."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.ones(6, dtype=torch.float16))
    optimizer = ZeroOptimizer([parameter], AdamW, stage=2, lr=0.1)
    scaler = LossScaler(init_scale=1024.0)
    taken = []
    for factor in (1.0, float("inf"), 1.0):
        weights = torch.ones(6, dtype=torch.float16)
        weights[0] = factor
        loss = (parameter * weights).sum() * (1 if rank == 0 else 0.5)
        scaler.scale_loss(loss).backward()
        finite = scaler.unscale(optimizer.gradients)
        scaler.update(finite)
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken.append(finite)
    return taken, scaler.scale, parameter.tolist()


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
def test_a_loss_scaler_over_the_shards(world):
    for taken, scale, weights in world(3).run(scaled_fp16):
        assert taken == [True, False, True]
        assert scale == 512
        # two steps of 0.1, and AdamW's decay of 0.01 * 0.1
        assert weights == pytest.approx([0.798] * 6, abs=0.003)


def masters_of_rank_0():
    """Each rank begins with other weights; the masters must be rank 0's."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.arange(5.0).bfloat16() + 10 * rank)
    optimizer = ZeroOptimizer([parameter], torch.optim.SGD, lr=1.0)
    (bucket,) = optimizer.buckets
    whole = torch.zeros(bucket.layout.padded_numel)
    whole[:5] = torch.arange(5.0)
    assert torch.equal(bucket.master, bucket.layout.shard(whole, rank))
    optimizer.step()
    return parameter.tolist()


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
def test_masters_begin_as_rank_0s_weights(world):
    assert world(3).run(masters_of_rank_0) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3


def only_rank_0_has_a_gradient(stage):
    """The second backward is rank 0's alone, onto gradients that were kept."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = ZeroOptimizer([parameter], torch.optim.SGD, stage=stage, lr=1.0)
    weights = []
    for step in range(2):
        if step == 0 or rank == 0 or stage == 2:  # stage 2 meets in backward
            (parameter.sum() * (step == 0 or rank == 0)).backward()
        optimizer.step()
        weights.append(parameter.tolist())
    return weights


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_needs_no_gradient_of_any_rank(world, stage):
    """Every rank reduces every bucket, whatever it has itself."""
    size = 2
    kept = -1 - (1 + 1 / size)
    for weights in world(size).run(only_rank_0_has_a_gradient, stage):
        assert weights == [[-1.0] * 3, [kept] * 3]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x, use_b):
        return self.b(x) if use_b else self.a(x)


def other_parts(stage):
    """Each rank uses another parameter; on each the other's gradient is zero."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Branches()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ZeroOptimizer(
        model.parameters(), torch.optim.SGD, stage=stage, bucket_cap_mb=1e-6, lr=1.0
    )
    assert len(optimizer.buckets) == 2
    model(torch.ones(1, 2), use_b=rank == 1).sum().backward()
    norm = optimizer.clip_grad_norm_(100.0)
    again = optimizer.clip_grad_norm_(100.0)  # asks, and reduces nothing twice
    optimizer.step()
    moved = [b - p for b, p in zip(before, model.parameters(), strict=True)]
    return norm, again, moved


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_use_different_parameters(world, stage):
    for norm, again, moved in world(2).run(other_parts, stage):
        assert norm == again == pytest.approx(2**0.5)
        for difference in moved:
            torch.testing.assert_close(difference, torch.full((2, 2), 0.5))


def clip(value, max_norm, bad):
    rank = dist.get_rank()
    shards = [torch.full((2,), value * (3.0 + rank)), torch.zeros(0)]
    if rank == 1 and bad:
        shards[0][0] = float("nan")
    norm = clip_sharded_grad_norm_(shards, max_norm)
    return norm.item(), shards[0].tolist()


@pytest.mark.verifies("xtrain.zero.clip:clip_sharded_grad_norm_")
def test_clipping_adds_squares_not_norms(world):
    """In float64: 1e20 squared is above the range of float32, 1e-30 squared below."""
    norm = (2 * 9 + 2 * 16) ** 0.5
    for value, limit in ((1.0, 1.0), (1.0, 100.0), (1e20, 1e30), (1e-30, 1.0)):
        for rank, result in enumerate(world(2).run(clip, value, limit, False)):
            found, shard = result
            assert found == pytest.approx(value * norm, rel=1e-6)
            kept = min(1.0, limit / (value * norm))
            assert shard == pytest.approx([value * (3 + rank) * kept] * 2, rel=1e-5)
    for found, shard in world(2).run(clip, 1.0, 1.0, True):
        assert found != found
        assert all(value != value for value in shard)  # on both ranks


def a_third(stage):
    """The mean of 1, 0 and 0, from bf16 gradients, for fp32 masters or shards."""
    used = dist.get_rank() == 0
    if stage == 3:
        layer, low = nn.Linear(3, 1, bias=False), torch.bfloat16
        model = FullyShardedDataParallel(layer, compute_dtype=low)
        (model(torch.ones(1, 3)) * used).sum().backward()
        (gradient,) = (p.grad for p in model.parameters())
    else:
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = ZeroOptimizer([parameter], torch.optim.SGD, stage=stage, lr=1.0)
        (parameter * used).sum().backward()
        (gradient,) = optimizer.gradients
    return gradient.dtype, gradient.tolist()


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer", FSDP)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_divided_in_fp32(world, stage):
    third = torch.tensor(1 / 3).item()
    assert third != torch.tensor(1 / 3).bfloat16().item()
    assert world(3).run(a_third, stage) == [(torch.float32, [third])] * 3


def clip_between_micro_batches(stage):
    rank = dist.get_rank()
    model = make_model(0)
    optimizer = ZeroOptimizer(model.parameters(), AdamW, stage=stage, **OPTIONS)
    for step in range(2):
        loss_of(model, batch_of(step, 0, rank)).backward()
        optimizer.clip_grad_norm_(0.5)
        loss_of(model, batch_of(step, 1, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_after_clipping_adds_to_what_is_left(world, stage):
    size, bare = 2, make_model(0)
    optimizer = adamw(bare.parameters())
    for step in range(2):
        for micro in (0, 1):
            for rank in range(size):
                (loss_of(bare, batch_of(step, micro, rank)) / size).backward()
            if micro == 0:
                nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for weights in world(size).run(clip_between_micro_batches, stage):
        assert largest_difference(weights, dict(bare.state_dict())) < 1e-12


@pytest.mark.verifies("xtrain.zero.buckets:split_parameters")
def test_neighbours_share_a_bucket_up_to_the_cap_and_only_with_their_own_dtype():
    def sizes(numbers, cap):
        parameters = [nn.Parameter(torch.zeros(n)) for n in numbers]
        lists = split_parameters(parameters, cap)
        order = [id(p) for members in lists for p in members]
        assert order == list(map(id, parameters))
        return [[p.numel() for p in members] for members in lists]

    assert sizes([5, 5, 5, 5, 5], 40) == [[5, 5], [5, 5], [5]]  # 40 bytes fit exactly
    assert sizes([5, 5, 5, 5, 5], 39) == [[5]] * 5
    assert sizes([20, 1, 1, 1], 12) == [[20], [1, 1, 1]]  # counted anew
    kinds = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
    mixed = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in kinds]
    lists = split_parameters(mixed, 1000)
    assert [{p.dtype for p in members} for members in lists] == [
        {torch.float32},
        {torch.float64},
        {torch.bfloat16},
    ]


class OfAllTypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        kinds = (torch.float64, torch.float32, torch.float64)
        self.layers = nn.ModuleList([nn.Linear(3, 3).to(dtype) for dtype in kinds])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Late:
    """A collective that is issued when it is waited for, and no sooner."""

    def __init__(self, *call):
        self.call = call

    def wait(self):
        function, tensors, group = self.call
        function(*tensors, group=group)


def late(name):
    function = getattr(RING, name)
    return lambda *tensors, group=None: Late(
        lambda *t, group: function(*t, group=group).wait(), tensors, group
    )


NAMES = ("all_reduce", "all_gather", "reduce_scatter")
LATE = dataclasses.replace(RING, **{name: late(name) for name in NAMES})


def waited_for(stage):
    """Two steps of a model of two dtypes, its gradients begun in memory full of NaN."""
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    rank = dist.get_rank()
    model = OfAllTypes()
    model.layers[1].register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer = ZeroOptimizer(
        model.parameters(), AdamW, stage, collectives=LATE, lr=0.1, bucket_cap_mb=2**-14
    )
    assert len(optimizer.buckets) == 5
    for step in range(2):
        model(torch.ones(2, 3) * (rank + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
@pytest.mark.parametrize("stage", [1, 2])
def test_every_collective_is_waited_for_and_what_has_no_gradient_is_zero(world, stage):
    bare = OfAllTypes()
    bare.layers[1].register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.1)
    for step in range(2):
        for rank in range(3):
            (bare(torch.ones(2, 3) * (rank + step)).sum() / 3).backward()
        bare.layers[1].unused.grad = torch.zeros(2)
        optimizer.step()
        optimizer.zero_grad()
    for weights in world(3).run(waited_for, stage):
        for name, tensor in bare.state_dict().items():  # a NaN is no small difference
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)


def without_all_gather():
    """What ranks have when the second half of the step is forgotten."""
    rank = dist.get_rank()
    model = own_model(rank)
    optimizer = ZeroOptimizer(model.parameters(), AdamW, **OPTIONS)
    optimizer._gather_weights = lambda: None
    loss_of(model, batch_of(0, 0, rank)).backward()
    optimizer.step()
    return dict(model.state_dict())


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
def test_without_the_all_gather_ranks_drift_apart(world):
    results = world(2).run(without_all_gather)
    assert largest_difference(results[0], results[1]) > 1e-3


def test_the_reference_optimizer_is_torchs():
    assert isinstance(adamw([nn.Parameter(torch.ones(1))]), torch.optim.AdamW)
