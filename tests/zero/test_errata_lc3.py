"""What the original notes on ZeRO say, run, and what is right, run beside it.

Each test is the proof of one entry of the errata page; more proofs of that page are in
test_zero.py, test_stage3.py, test_flat.py and tests/plan/test_memory.py.
"""

import warnings
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import wrapped
from xtrain import comm
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import RING, TORCH
from xtrain.plan import zero_memory
from xtrain.zero import AdamW, FullyShardedDataParallel, MixedPrecisionOptimizer

BILLION = 10**9


@pytest.fixture
def on_cpu(xtrain_worlds):
    """Skip elsewhere: the claim is about torch's classes as they run on CPUs."""
    if xtrain_worlds.device != "cpu":
        pytest.skip("torch's FSDP is looked at on CPUs")


def ranks() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# ------------------------------------------- E36, E38: sixteen bytes, not twenty


def bytes_of_training(dtype, make_optimizer):
    """Bytes per parameter after a real step: weights, gradients, masters, moments.

    And their sum while the masters are stepped.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    optimizer = make_optimizer(model.parameters())
    mixed = isinstance(optimizer, MixedPrecisionOptimizer)
    inner = optimizer.optimizer if mixed else optimizer
    loss = model(torch.ones(2, 5, dtype=dtype)).float().square().sum()
    loss.backward()
    parameters = list(model.parameters())
    stepped = [p for group in inner.param_groups for p in group["params"]]
    mine = {id(p) for p in parameters}
    masters = [p for p in stepped if id(p) not in mine]
    phi = sum(p.numel() for p in parameters)

    def held():
        grads = [p.grad for p in (*parameters, *masters) if p.grad is not None]
        moments = [t for s in inner.state.values() for t in s.values() if t.dim()]
        kinds = (parameters, grads, masters, moments)
        return tuple(Fraction(nbytes(tensors), phi) for tensors in kinds)

    inside = []
    inner.register_step_post_hook(lambda *_: inside.append(sum(held())))
    optimizer.step()
    return held(), inside[0]


def test_sixteen_bytes_per_parameter_in_either_precision():
    """torch's own optimizer too: nowhere is there an fp32 copy of fp32 weights."""
    in_fp32, in_bf16 = (4, 4, 0, 8), (2, 2, 4, 8)
    for optimizer in (torch.optim.AdamW, AdamW):
        assert bytes_of_training(torch.float32, optimizer) == (in_fp32, 16)

    def mixed(parameters):
        return MixedPrecisionOptimizer(parameters, AdamW)

    assert bytes_of_training(torch.float32, mixed) == (in_fp32, 16)
    # Between steps; inside one every master has an fp32 gradient too, for a moment.
    assert bytes_of_training(torch.bfloat16, mixed) == (in_bf16, 20)
    # The notes add 4 for a master to the first row: 20, so 140 GB for 7 billion.
    assert sum((4, 4, 4, 8)) * 7 == 140
    assert zero_memory(7 * BILLION, 1, 0, "fp32") == 112 * BILLION


def test_how_the_notes_come_to_66_and_17_gigabytes():
    """E37: from the copy that is not there, and from gradients and weights in fp32."""
    weights = gradients = Fraction(28)
    state = 3 * 28
    assert weights + gradients + Fraction(state, 8) == 66.5
    assert Fraction(140, 8) == 17.5
    real = [zero_memory(7 * BILLION, 8, stage) / BILLION for stage in (1, 2, 3)]
    assert real == [38.5, 26.25, 14.0]
    in_fp32 = [zero_memory(7 * BILLION, 8, s, "fp32") / BILLION for s in (1, 2, 3)]
    assert in_fp32 == [63.0, 38.5, 14.0]


# ---------------------------------------------------- E39: how much a stage saves


def test_four_and_eight_are_limits_and_stage_3_saves_n_times():
    phi = 2**40

    def saving(ranks, stage):
        return Fraction(zero_memory(phi, ranks, 0), zero_memory(phi, ranks, stage))

    assert saving(8, 1) == Fraction(16, 4 + Fraction(12, 8)) < 3
    assert saving(8, 2) == Fraction(16) / (2 + Fraction(14, 8)) < Fraction(43, 10)
    for ranks in (2, 8, 64, 1024):
        assert saving(ranks, 1) < 4
        assert saving(ranks, 2) < 8
        assert saving(ranks, 3) == ranks  # and not eight times as much
    assert saving(2**20, 1) > Fraction(3999, 1000)
    assert saving(2**20, 2) > Fraction(7999, 1000)


# ----------------------------------------- E40, E43, E45: what the stages send


class Tower(nn.Module):
    """Layers that are blocks and nothing else; sizes divide by 2, 3 and 4."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


PHI = 4 * 3 * (12 * 12 + 12)  # bytes


def stage_1_of_the_notes():
    """All-reduce the gradients, step the own part, gather the weights."""
    rank, size = ranks()
    model = Tower()
    model(torch.ones(2, 12) * rank).square().sum().backward()
    flat_grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    with CommLedger() as ledger:
        comm.ring_all_reduce(flat_grad)
        own = nn.Parameter(flat.chunk(size)[rank].clone())
        own.grad = flat_grad.chunk(size)[rank] / size
        torch.optim.AdamW([own]).step()
        comm.ring_all_gather(flat, own.detach())
    return ledger.bytes_sent, flat


def stage_of_ours(stage):
    rank, _ = ranks()
    model, optimizer = wrapped(stage, Tower(), collectives=RING)
    with CommLedger() as ledger:
        model(torch.ones(2, 12) * rank).square().sum().backward()
        optimizer.step()
    state = model.full_state_dict() if stage == 3 else model.state_dict()
    return ledger.bytes_sent, torch.cat([t.flatten() for t in state.values()])


@pytest.mark.verifies(
    "xtrain.zero.optimizer:ZeroOptimizer", "xtrain.zero.fsdp:FullyShardedDataParallel"
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_two_phi_two_phi_three_phi_and_the_notes_three(world, size):
    """The same weights each time; one and a half times the bytes in stage 3 exactly."""
    unit = Fraction(size - 1, size) * PHI
    results = {stage: world(size).run(stage_of_ours, stage) for stage in (1, 2, 3)}
    results["notes"] = world(size).run(stage_1_of_the_notes)
    sent = {name: {sent for sent, _ in found} for name, found in results.items()}
    assert sent == {1: {2 * unit}, 2: {2 * unit}, 3: {3 * unit}, "notes": {3 * unit}}
    for found in results.values():
        for _, weights in found:
            torch.testing.assert_close(weights, results[1][0][1])


def accumulated(stage, micro_batches):
    """Bytes of a step of several micro-batches, in units of (N-1)/N Phi."""
    rank, size = ranks()
    model, optimizer = wrapped(stage, Tower(), collectives=RING)
    with CommLedger() as ledger:
        for micro in range(micro_batches - 1):
            with nullcontext() if stage else model.no_sync():
                model(torch.ones(2, 12) * (rank + micro)).sum().backward()
        model(torch.ones(2, 12) * rank).sum().backward()
        optimizer.step()
    sent = sum(event.nbytes for event in ledger.events if event.kind == "send")
    return sent / ((size - 1) / size * PHI)


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_stage_2_reduces_every_micro_batch(world, micro_batches):
    """E44: K + 1 passes; stage 1, and data parallelism with no_sync, stay at two."""
    for stage, passes in ((0, 2), (1, 2), (2, micro_batches + 1)):
        for sent in world(2).run(accumulated, stage, micro_batches):
            assert sent == pytest.approx(passes, rel=3e-3)  # a flag more in stage 0


# ------------------------------------------------------- E46: who cuts what, and how


def shapes_under_fsdp():
    """Local shapes of a 5 x 3 weight and its bias of 5: FSDP1, FSDP2, ours."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")  # FSDP1 on CPUs says that it is slow
    cpu = torch.device("cpu")
    one = FSDP1(nn.Linear(3, 5), device_id=cpu)
    two = fully_shard(nn.Linear(3, 5))
    ours = FullyShardedDataParallel(nn.Linear(3, 5))
    return (
        [tuple(p.shape) for p in one.parameters()],
        [tuple(p.to_local().shape) for p in two.parameters()],
        [tuple(p.shape) for p in ours.parameters()],
    )


def test_flat_per_unit_or_rows_per_parameter(on_cpu, world):
    first, second = world(2).run(shapes_under_fsdp)
    assert first == ([(10,)], [(3, 3), (3,)], [(10,), (0,)])
    assert second == ([(10,)], [(2, 3), (2,)], [(5,), (5,)])


# --------------------------------------------- E49: stage 2 does not wait for the end


def calls_of_stage_2(cap):
    """Collectives by the time of the first parameter, which backward reaches last; at
    the end of backward; in the step. And whole gradients that are left over."""
    rank, _ = ranks()
    model, optimizer = wrapped(2, Tower(), bucket_cap_mb=cap, collectives=TORCH)
    early = []
    first = next(model.parameters())
    with CommLedger() as ledger:
        first.register_post_accumulate_grad_hook(
            lambda _: early.append(len(ledger.events))
        )
        model(torch.ones(2, 12) * rank).sum().backward()
    backward = [e.op for e in ledger.events if e.kind == "collective"]
    with CommLedger() as ledger:
        optimizer.step()
    step = [e.op for e in ledger.events if e.kind == "collective"]
    left = [p for p in model.parameters() if p.grad is not None]
    return early, backward, step, len(optimizer.buckets), len(left)


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
def test_stage_2_reduce_scatters_in_backward_and_keeps_nothing_whole(on_cpu, world):
    for early, backward, step, buckets, left in world(2).run(calls_of_stage_2, 2**-10):
        assert early[0] >= buckets - 1 >= 2  # all buckets but the last one
        assert len(backward) == buckets
        assert all("reduce_scatter" in op for op in backward), backward
        assert len(step) == buckets
        assert all("gather" in op for op in step), step
        assert left == 0


def stage_2_of_the_notes():
    """All-reduce after backward, scatter from rank 0, step, gather the weights."""
    rank, size = ranks()
    model = Tower()
    model(torch.ones(2, 12) * rank).square().sum().backward()
    alive = nbytes(p.grad for p in model.parameters())
    flat_grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    with CommLedger() as ledger:
        comm.ring_all_reduce(flat_grad)
        own = nn.Parameter(flat.chunk(size)[rank].clone())
        own.grad = torch.empty_like(own)
        parts = [part.contiguous() for part in flat_grad.chunk(size)]
        comm.scatter(own.grad, parts if rank == 0 else None, 0)
        own.grad /= size
        torch.optim.AdamW([own]).step()
        comm.ring_all_gather(flat, own.detach())
    return ledger.bytes_sent, flat, alive


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_and_scatter_sends_up_to_twice_as_much(world, size):
    """E49: the weights are those of stage 2, for 4 and 3 passes instead of 2."""
    unit = Fraction(size - 1, size) * PHI
    ours = world(size).run(stage_of_ours, 2)
    for rank, (sent, weights, alive) in enumerate(
        world(size).run(stage_2_of_the_notes)
    ):
        assert sent == (3 if rank else 4) * unit
        assert ours[rank][0] == 2 * unit
        assert alive == PHI
        torch.testing.assert_close(weights, ours[rank][1])


# ----------------------------------------------- E54: what FSDP's strategies shard


def fsdp1(strategy):
    """Bytes of weights at rest and between the passes; collectives of a step."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
    from torch.distributed.fsdp import ShardingStrategy

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    model = FSDP1(
        nn.Sequential(*layers),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True,
    )
    held = nbytes(model.parameters())
    with CommLedger() as ledger:
        model(torch.ones(2, 8)).sum().backward()
    # torch's dispatcher says allreduce, a backend of ours all_reduce.
    calls = [event.op.replace("allreduce", "all_reduce") for event in ledger.events]
    return held, calls


def fsdp2(reshard):
    from torch.distributed.fsdp import fully_shard

    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(nn.Sequential(*layers), reshard_after_forward=reshard)


def step_of_fsdp2(reshard):
    model = fsdp2(reshard)
    held = nbytes(p.to_local() for p in model.parameters())
    with CommLedger() as ledger:
        model(torch.ones(2, 8)).sum().backward()
    return held, [event.op for event in ledger.events]


def test_shard_grad_op_shards_weights_at_rest(on_cpu, world):
    """Stage 2 keeps weights whole. SHARD_GRAD_OP keeps a part, and gathers it once."""
    whole, halves = 3 * 8 * 8 * 4, 3 * 8 * 8 * 4 // 2
    expected = {
        "FULL_SHARD": (halves, {"gather": 6, "reduce_scatter": 3}),
        "SHARD_GRAD_OP": (halves, {"gather": 3, "reduce_scatter": 3}),
        "NO_SHARD": (whole, {"all_reduce": 3}),
    }
    for strategy, (bytes_held, numbers) in expected.items():
        for found, calls in world(2).run(fsdp1, strategy):
            assert found == bytes_held, strategy
            assert len(calls) == sum(numbers.values()), calls
            for kind, number in numbers.items():
                assert sum(kind in op for op in calls) == number, calls
    for reshard, gathers in ((True, 2), (False, 1)):
        for found, calls in world(2).run(step_of_fsdp2, reshard):
            assert found == halves
            assert sum("gather" in op for op in calls) == 3 * gathers, calls
            assert sum("reduce_scatter" in op for op in calls) == 3


def held_between_the_passes(reshard):
    """Bytes of weights that a rank has after forward."""
    model = fsdp2(reshard)
    loss = model(torch.ones(2, 8)).sum()
    held = nbytes(p.to_local() for p in model.parameters())
    loss.backward()
    return held, nbytes(p.to_local() for p in model.parameters())


def test_fsdp2_may_keep_a_copy_in_each_node_until_backward(on_cpu, world):
    """Four ranks, two a node: halves between the passes, quarters at rest."""
    whole = 3 * 8 * 8 * 4
    assert world(4).run(held_between_the_passes, True) == [(whole // 4, whole // 4)] * 4
    assert world(4).run(held_between_the_passes, 2) == [(whole // 2, whole // 4)] * 4
