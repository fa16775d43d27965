"""The whiteboard forms of lc3 pass the library forms' checks, inside their limits.

Model, batches and the one process that they are compared with are those of tests/zero.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import (
    Model,
    batch_of,
    largest_difference,
    loss_of,
    make_model,
    my_group,
    reference,
    storages,
)
from tests.whiteboard.ring_instead import ring_instead
from tests.zero import test_adam
from tests.zero.test_stage3 import eval_between, fixed_loss, twice
from tests.zero.test_zero import Branches, own_model
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger
from xtrain.copying.forms import forms, header
from xtrain.plan import state_memory
from xtrain.whiteboard.zero import clip_grad_norm as clip_file
from xtrain.whiteboard.zero import fully_sharded, zero_1, zero_2
from xtrain.whiteboard.zero import fully_sharded_prefetch as prefetch_file
from xtrain.whiteboard.zero.adamw import AdamW
from xtrain.whiteboard.zero.clip_grad_norm import clip_grad_norm
from xtrain.whiteboard.zero.fully_sharded import FullySharded
from xtrain.whiteboard.zero.fully_sharded_prefetch import FullyShardedPrefetch
from xtrain.whiteboard.zero.mixed_precision import MixedPrecision
from xtrain.whiteboard.zero.muon import Muon
from xtrain.whiteboard.zero.zero_1 import Zero1
from xtrain.whiteboard.zero.zero_2 import Zero2
from xtrain.zero import Muon as LibraryMuon

ADAMW = "xtrain.whiteboard.zero.adamw:AdamW"
MIXED = "xtrain.whiteboard.zero.mixed_precision:MixedPrecision"
CLIP = "xtrain.whiteboard.zero.clip_grad_norm:clip_grad_norm"
MUON = "xtrain.whiteboard.zero.muon:Muon"
PREFETCH = "xtrain.whiteboard.zero.fully_sharded_prefetch:FullyShardedPrefetch"
FSDP = "xtrain.whiteboard.zero.fully_sharded:FullySharded"
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
STEPS = 5
FORMS = {1: Zero1, 2: Zero2, 3: FullySharded}
FILES = {1: zero_1, 2: zero_2, 3: fully_sharded}
SYMBOLS = {
    1: "xtrain.whiteboard.zero.zero_1:Zero1",
    2: "xtrain.whiteboard.zero.zero_2:Zero2",
    3: FSDP,
}
STAGES_1_AND_2 = [
    pytest.param(1, marks=pytest.mark.verifies(SYMBOLS[1])),
    pytest.param(2, marks=pytest.mark.verifies(SYMBOLS[2])),
]
STAGES = [*STAGES_1_AND_2, pytest.param(3, marks=pytest.mark.verifies(FSDP))]


# --- AdamW ----------------------------------------------------------------------------


@pytest.mark.verifies(ADAMW)
@pytest.mark.parametrize(
    "options",
    [{}, {"lr": 0.03, "weight_decay": 0.2}, {"betas": (0.8, 0.95), "eps": 1e-6}],
)
def test_a_hundred_steps_of_adamw_equal_torch(options):
    test_adam.compare(AdamW, torch.optim.AdamW, options)


@pytest.mark.verifies(ADAMW)
def test_adamw_in_sixteen_bits_keeps_the_dtype_and_moves_by_the_rate():
    for dtype in (torch.bfloat16, torch.float16):
        parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
        parameter.grad = torch.tensor([3.0, -0.1, 0.5], dtype=dtype)
        optimizer = AdamW([parameter], lr=0.25, eps=1e-4)
        optimizer.step()
        assert parameter.dtype == optimizer.state[parameter]["exp_avg"].dtype == dtype
        torch.testing.assert_close(
            parameter.double(), torch.tensor([-0.25, 0.25, -0.25]).double(),
            rtol=0.05, atol=0,
        )  # fmt: skip


# --- mixed precision ------------------------------------------------------------------


@pytest.mark.verifies(MIXED)
def test_masters_add_up_what_bf16_would_lose():
    alone, linked = (nn.Parameter(torch.ones(1).bfloat16()) for _ in range(2))
    wide = nn.Parameter(torch.ones(1))  # stepped as it is
    plain = torch.optim.SGD([alone], lr=0.001)
    mixed = MixedPrecision(iter([linked, wide]), torch.optim.SGD, lr=0.001)
    for _ in range(100):
        for parameter in (alone, linked, wide):
            parameter.grad = torch.ones_like(parameter)
        plain.step()
        assert mixed.step() is True
        mixed.zero_grad()
    assert alone.item() == 1.0
    master, same = mixed.masters
    assert (master.dtype, master.grad, linked.grad) == (torch.float32, None, None)
    assert master.item() == same.item() == pytest.approx(0.9, abs=1e-5)
    assert torch.equal(linked, master.bfloat16())
    assert wide is same


@pytest.mark.verifies(MIXED)
def test_scaling_saves_small_fp16_gradients():
    for scale, moved in ((None, False), (2.0**16, True)):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
        optimizer = MixedPrecision([parameter], torch.optim.SGD, scale, lr=1e6)
        optimizer.backward((parameter * 1e-4).float().sum() * 1e-4)
        optimizer.step()
        assert bool(parameter != 0) is moved
        if moved:
            assert parameter.item() == pytest.approx(-0.01, rel=0.01)


@pytest.mark.verifies(MIXED)
def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = MixedPrecision([parameter], AdamW, 8.0, lr=0.1)
    optimizer.growth_interval = 3
    scales = []
    good_steps = 3 * [True] + [False] + 2 * [True] + [False] + 6 * [True]
    for good in good_steps:
        before = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
        parameter.grad[1] = 1.0 if good else float("nan")
        assert optimizer.step() is good
        assert torch.equal(parameter, before) is not good
        scales.append(optimizer.scale)
    assert scales == [8, 8, 16, 8, 8, 8, 4, 4, 4, 8, 8, 8, 16]  # again and again
    optimizer.zero_grad()
    optimizer.backward((parameter * parameter).sum())  # the NaN is forgotten
    assert optimizer.step() is True
    assert torch.isfinite(parameter).all()


def overflow_in_group_1():
    number, group, index = my_group()
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = MixedPrecision([parameter], AdamW, 8.0, process_group=group, lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    if (number, index) == (1, 2):
        parameter.grad[1] = float("inf")
    with CommLedger() as ledger:
        stepped = optimizer.step()
    (event,) = ledger.events
    return number, stepped, optimizer.scale, event.op, event.payload


@pytest.mark.verifies(MIXED)
def test_an_overflow_on_one_rank_makes_its_group_skip(world):
    assert header(forms()["mixed_precision"].read_text())["Sends"].startswith(
        "one number a step"
    )
    for number, *found, op, payload in world(5).run(overflow_in_group_1):
        assert found == ([True, 8.0] if number == 0 else [False, 4.0])
        assert (op, payload) == ("allreduce", 4)


def in_sixteen_bits(stage, dtype):
    """Training with masters of the shards; weights and losses of 20 steps."""
    rank = dist.get_rank()
    model = own_model(rank, dtype=dtype)
    scale = 1024.0 if dtype == torch.float16 else None
    with_masters = partial(MixedPrecision, optimizer_class=AdamW, init_scale=scale)
    losses = []
    optimizer = FORMS[stage](model.parameters(), with_masters, lr=0.02)
    for _ in range(20):
        loss = loss_of(model, batch_of(0, 0, rank)) / 20
        optimizer.optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    masters = optimizer.optimizer.masters
    return losses, dict(model.state_dict()), {m.dtype for m in masters}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES_1_AND_2)
def test_sixteen_bit_training_with_masters_of_the_shards(world, stage, dtype):
    (losses, state, kinds), (_, other, _) = world(2).run(in_sixteen_bits, stage, dtype)
    assert kinds == {torch.float32}
    assert losses[-1] < losses[0] / 2
    assert largest_difference(state, other) == 0.0


# --- Muon -----------------------------------------------------------------------------

MATRICES = [(5, 12), (13, 4), (8, 8), (1, 7), (16, 24)]


def dealt_out(members, dtype, by_library):
    """Five steps of a group, beside torch's; elements of momentum on this rank.

    Weights of 16 bits are rounded in another way where memory is in another order.
    """
    group, rank = dist.new_group(members), dist.get_rank()
    if rank not in members:
        return None
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in MATRICES]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    form = LibraryMuon if by_library else Muon
    ours = form(mine, lr=0.02, weight_decay=0.3, process_group=group)
    alone = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3)
    for _ in range(STEPS):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn_like(one)  # averaged already
            other.grad = one.grad.clone()
        ours.step()
        alone.step()
    error = 2**-6 if dtype is torch.bfloat16 else 0
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error)
    return sum(s["momentum_buffer"].numel() for s in ours.state.values())


@pytest.mark.parametrize(
    "by_library",
    [
        pytest.param(False, marks=pytest.mark.verifies(MUON), id="whiteboard"),
        pytest.param(
            True, marks=pytest.mark.verifies("xtrain.zero.muon:Muon"), id="library"
        ),
    ],
)
@pytest.mark.parametrize("members", [[0], [1, 3], [0, 1, 2], [0, 1, 2, 3]])
def test_matrices_dealt_out_are_stepped_as_by_torch(world, members, by_library):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        results = world(4).run(dealt_out, members, dtype, by_library)
        total = sum(rows * columns for rows, columns in MATRICES)
        assert sum(results[rank] for rank in members) == total


# --- clipping -------------------------------------------------------------------------


def clip(members, value, max_norm, bad):
    group = dist.new_group(members)
    rank = dist.get_rank()
    shards = [torch.full((2,), value * (1 + rank)), torch.zeros(0)]
    if rank == members[-1] and bad:
        shards[0][0] = float("nan")
    if rank not in members:
        return None
    with CommLedger() as ledger, ring_instead(clip_file):
        norm = clip_grad_norm(shards, max_norm, group)
    return norm.item(), shards[0].tolist(), ledger.bytes_sent


@pytest.mark.verifies(CLIP)
@pytest.mark.parametrize("members", [[0], [0, 1, 2, 3], [1, 3]])
def test_clipping_adds_squares_over_the_group(world, members):
    words = header(forms()["clip_grad_norm"].read_text())["Sends"]
    assert words.startswith("2(N-1)/N of one float64")
    size = len(members)
    for value in (3.0, 1e20, 1e-30):  # squared, the last two leave float32
        norm = value * sum(2 * (1 + r) ** 2 for r in members) ** 0.5
        for limit in (norm / 4, norm * 4):
            results = world(4).run(clip, members, value, limit, False)
            assert [r for r in range(4) if results[r]] == members
            for rank in members:
                found, shard, _ = results[rank]
                assert found == pytest.approx(norm, rel=1e-6)
                kept = limit / (norm + 1e-6) if limit < norm else 1.0
                assert shard == pytest.approx([value * (1 + rank) * kept] * 2, rel=1e-5)
            assert sum(results[r][2] for r in members) == 2 * (size - 1) * 8
    for result in filter(None, world(4).run(clip, members, 1.0, 1.0, True)):
        assert result[0] != result[0]
        assert all(value != value for value in result[1])  # on every rank


# --- ZeRO-1, 2 and 3 ------------------------------------------------------------------


class Run:
    """A model, trained by one of the forms."""

    def __init__(self, stage, bare, group=None, optimizer_class=torch.optim.AdamW):
        self.stage, self.group = stage, group
        self.names = {p: name for name, p in bare.named_parameters()}
        if stage == 3:
            self.model = FullySharded(bare, group)
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = optimizer_class(trainable, **OPTIONS)
            self.shards = [unit.shard for unit in self.units()]
        else:
            self.model = bare
            self.optimizer = FORMS[stage](
                bare.parameters(), optimizer_class, group, **OPTIONS
            )
            self.shards = (
                [self.optimizer.shard]
                if stage == 1
                else [own for _, own in self.optimizer.shards.values()]
            )

    def units(self):
        return [m for m in self.model.modules() if isinstance(m, FullySharded)]

    def step(self, batches, max_norm=None):
        for batch in batches:
            loss_of(self.model, batch).backward()
        if max_norm is not None:
            if self.stage == 1:
                self.optimizer.reduce_gradients()
            clip_grad_norm([s.grad for s in self.shards], max_norm, self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        """Every parameter, whole, by its name in the bare module."""
        if self.stage < 3:
            return {name: p.detach().clone() for p, name in self.names.items()}
        return whole(self.model, self.names)


def whole(model, names):
    found = {}
    for unit in (m for m in model.modules() if isinstance(m, FullySharded)):
        parameters = dict(unit.module.named_parameters())
        full = unit.shard.detach()
        parts = [torch.empty_like(full) for _ in range(unit.size)]
        dist.all_gather(parts, full, group=unit.group)
        flat, start = torch.cat(parts), 0
        for name, shape in unit.shapes.items():
            end = start + shape.numel()
            found[names[parameters[name]]] = flat[start:end].view(shape).clone()
            start = end
    for parameter, name in names.items():
        if not parameter.requires_grad:
            found[name] = parameter.detach().clone()
    return {name: found[name] for name in names.values()}


def start(stage, frozen):
    """Other weights on every rank; in stages 1 and 2 what is frozen is rank 0's."""
    model = own_model(dist.get_rank(), frozen)
    if stage < 3:
        first = dict(make_model(0, frozen).named_parameters())
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                parameter.data.copy_(first[name])
    return model


def train(stage, micro_batches, frozen, max_norm, ours):
    rank = dist.get_rank()
    made = AdamW if ours else torch.optim.AdamW
    run = Run(stage, start(stage, frozen), optimizer_class=made)
    for step in range(STEPS):
        micros = [batch_of(step, micro, rank) for micro in range(micro_batches)]
        run.step(micros, max_norm)
        if step == 2:  # an evaluation, and a forward whose backward never comes
            with torch.no_grad():
                loss_of(run.model, micros[0])
            loss_of(run.model, micros[0])
    return run.weights()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_equals_one_process(world, size, stage):
    for case in ((1, False, None, False), (2, True, 3.0, True)):
        micro_batches, frozen, max_norm, _ = case
        expected = reference(
            size, STEPS, micro_batches, frozen=frozen, max_norm=max_norm
        )
        results = world(size).run(train, stage, *case)
        expected = {name: expected[name] for name in results[0]}
        for result in results:
            assert largest_difference(result, expected) < 1e-12, case
            assert largest_difference(result, results[0]) == 0.0, case


def gradients(stage):
    """This rank's shards of the gradients, and the same of one process's gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bare = make_model(0)
    for other in range(size):
        (loss_of(bare, batch_of(0, 0, other)) / size).backward()
    run = Run(stage, own_model(rank))
    loss_of(run.model, batch_of(0, 0, rank)).backward()
    if stage == 1:
        run.optimizer.reduce_gradients()
    parameters = list(bare.parameters())
    if stage == 1:
        lists = [parameters]
    elif stage == 2:
        lists = [[p] for p in parameters[::-1]]
    else:
        named = dict(bare.named_parameters())
        inside = {id(p): run.names[p] for p in run.names}
        lists = [
            [named[inside[id(dict(u.module.named_parameters())[n])]] for n in u.shapes]
            for u in run.units()
        ]
    differences = []
    for shard, members in zip(run.shards, lists, strict=True):
        flat = torch.cat([p.grad.flatten() for p in members])
        flat = nn.functional.pad(flat, (0, -len(flat) % size)).chunk(size)[rank]
        differences.append((shard.grad - flat).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_gradient_equals_one_process(world, size, stage):
    assert max(world(size).run(gradients, stage)) < 1e-13


def other_parts(stage):
    """Each rank uses another parameter; on each the other's gradient is zero."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Branches()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = FORMS[stage](model.parameters(), torch.optim.SGD, lr=1.0)
    for _ in range(2):
        model(torch.ones(1, 2), use_b=rank == 1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [b - p for b, p in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("stage", STAGES_1_AND_2)
def test_ranks_may_use_different_parameters(world, stage):
    for moved in world(2).run(other_parts, stage):
        for difference in moved:
            torch.testing.assert_close(difference, torch.ones(2, 2))


# --- memory ---------------------------------------------------------------------------


def padded(numels, size):
    return sum(-(-n // size) * size for n in numels)


def measure(stage):
    """Bytes of weights, gradients and state; elements of weights, whole and padded."""
    rank, size = dist.get_rank(), dist.get_world_size()
    run = Run(stage, own_model(rank, dtype=torch.float32))
    numels = [p.numel() for p in run.names]
    if stage == 1:
        numels = [sum(numels)]
    elif stage == 3:
        numels = [sum(s.numel() for s in u.shapes.values()) for u in run.units()]
    loss_of(run.model, batch_of(0, 0, rank)).backward()
    weights = storages(run.model.parameters())
    kept = [p.grad for p in [*run.model.parameters(), *run.shards]]
    grads = storages(g for g in kept if g is not None)
    run.optimizer.step()
    run.optimizer.zero_grad()
    inner = run.optimizer if stage == 3 else run.optimizer.optimizer
    state = [t for s in inner.state.values() for t in s.values() if t.dim()]
    left = [p.grad for p in [*run.model.parameters(), *run.shards]]
    assert left == [None] * len(left)
    fulls = storages(u.full for u in run.units()) if stage == 3 else 0
    return (weights, grads, storages(state), fulls), numels, size


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_per_rank_equal_the_formula(world, size, stage):
    """What is flat is padded: all of it in stage 1, a parameter in 2, a block in 3."""
    for (weights, grads, state, fulls), numels, ranks in world(size).run(
        measure, stage
    ):
        memory = [state_memory(n, ranks, stage, "fp32") for n in numels]
        extra = padded(numels, ranks) - sum(numels) if stage < 3 else 0
        assert weights == sum(m.weights for m in memory) + 4 * extra
        assert grads == sum(m.gradients for m in memory)
        assert state == sum(m.optimizer for m in memory)
        assert fulls == 0


def live_gradients():
    """The most whole gradients that were alive at any hook of a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)])
    optimizer = Zero2(model.parameters(), torch.optim.SGD, lr=1.0)
    peak = 0

    def look(_):
        nonlocal peak
        alive = [p.grad for p in model.parameters() if p.grad is not None]
        peak = max(peak, len(alive))

    for layer in model:
        layer.register_full_backward_hook(lambda *_: look(None))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    model(torch.randn(2, 64)).square().sum().backward()
    shards = [own for _, own in optimizer.shards.values()]
    return peak, storages(s.grad for s in shards) / (64 * 64 * 4)


@pytest.mark.verifies(SYMBOLS[2])
def test_zero_2_frees_every_gradient_as_soon_as_it_is_complete(world):
    for peak, left in world(2).run(live_gradients):
        assert (peak, left) == (0, 6)


def whole_blocks(layers):
    """The most blocks whose weights were in memory at any time, root aside."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
    )

    def chain(x):
        x = module[0](x)
        for layer in module[1]:
            x = torch.tanh(layer(x))
        return x

    module.forward = chain
    model = FullySharded(module)
    units = [m for m in model.modules() if isinstance(m, FullySharded)][1:]
    assert len(units) == layers
    counts = {}

    def look(phase):
        full = sum(u.full.untyped_storage().nbytes() > 0 for u in units)
        counts.setdefault(phase, []).append(full)

    for unit in units:
        unit.module.register_forward_hook(lambda *_: look("in forward"))
        unit.module.register_full_backward_hook(lambda *_: look("in backward"))
        unit.register_forward_hook(lambda *_: look("between"))
    loss = model(torch.randn(2, 8)).sum()
    look("between")
    loss.backward()
    look("between")
    return counts


@pytest.mark.verifies(FSDP)
def test_one_block_is_whole_at_a_time_and_none_between(world):
    for counts in world(2).run(whole_blocks, 6):
        assert counts["in forward"] == [1] * 6
        assert set(counts["in backward"]) <= {0, 1}
        assert 1 in counts["in backward"]
        assert counts["between"] == [0] * 8


def odd_forwards():
    """Every rank has the same data: the average is each one's gradient."""
    rank = dist.get_rank()
    wide, low = torch.float32, torch.bfloat16  # 16-bit sums depend on their order
    for forward, dtypes in (
        (fixed_loss, (wide, low)),
        (twice, (wide,)),
        (eval_between, (wide,)),
    ):
        for dtype in dtypes:
            bare, inner = Model().to(dtype), Model().to(dtype)
            names = {p: name for name, p in inner.named_parameters()}
            model = FullySharded(inner)
            forward(bare).backward()
            forward(model).backward()
            named = dict(bare.named_parameters())
            for unit in (m for m in model.modules() if isinstance(m, FullySharded)):
                assert unit.full.untyped_storage().nbytes() == 0
                own = dict(unit.module.named_parameters())
                grads = [named[names[own[n]]].grad.flatten() for n in unit.shapes]
                flat = torch.cat(grads)
                flat = nn.functional.pad(flat, (0, -len(flat) % unit.size))
                expected = flat.chunk(unit.size)[rank]
                torch.testing.assert_close(unit.shard.grad, expected)


@pytest.mark.verifies(FSDP)
def test_forwards_in_other_orders_and_in_bf16(world):
    world(2).run(odd_forwards)


# --- what they send -------------------------------------------------------------------


def traffic(stage, micro_batches):
    rank, size = dist.get_rank(), dist.get_world_size()
    run = Run(stage, own_model(rank, dtype=torch.float32))
    numels = [s.numel() * size for s in run.shards]
    with CommLedger() as ledger, ring_instead(FILES[stage]):
        run.step([batch_of(0, micro, rank) for micro in range(micro_batches)])
    return ledger.bytes_sent, 4 * sum(numels)


PASSES = {
    1: ("2(N-1)/N of the parameters a step", lambda micro: 2),
    2: ("(N-1)/N of the parameters in each backward, and (N-1)/N in each step",
        lambda micro: 1 + micro),
    3: ("3(N-1)/N of the parameters a step", lambda micro: 3 * micro),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_sends_what_the_header_says(world, size, stage):
    words, passes = PASSES[stage]
    name = FILES[stage].__name__.rpartition(".")[2]
    assert header(forms()[name].read_text())["Sends"].startswith(words)
    for micro_batches in (1, 3):
        for sent, nbytes in world(size).run(traffic, stage, micro_batches):
            assert sent * size == passes(micro_batches) * (size - 1) * nbytes


def collectives_of(stage):
    run = Run(stage, own_model(dist.get_rank(), dtype=torch.float32))
    with CommLedger() as ledger:
        run.step([batch_of(0, 0, dist.get_rank())])
    return [event.op for event in ledger.events], len(run.shards)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_these_collectives_and_no_others(world, stage):
    for ops, shards in world(2).run(collectives_of, stage):
        scatters, gathers = (
            ops.count("_reduce_scatter_base"),
            ops.count("_allgather_base"),
        )
        assert scatters == shards
        assert gathers == shards * (2 if stage == 3 else 1)
        assert len(ops) == scatters + gathers


# --- FSDP with prefetch ---------------------------------------------------------------


def chain(dtype=torch.float64):
    """Blocks of odd sizes, so that every shard is padded on some number of ranks."""
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Embedding(7, 5), *inner, nn.Linear(5, 3)).to(dtype)


def tokens(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    drawn = torch.randint(0, 7, (4 + rank,), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def chain_steps(members, micro_batches):
    """Largest differences from one process, in weights and gradients."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    rank, size = dist.get_rank(group), len(members)
    bare, model = chain(), FullyShardedPrefetch(chain(), group)
    optimizers = [AdamW(m.parameters(), **OPTIONS) for m in (bare, model)]
    differences = []

    def compare(whole, shards):
        for tensors, shard in zip(whole, shards, strict=True):
            flat = torch.cat([t.detach().flatten() for t in tensors])
            flat = nn.functional.pad(flat, (0, -len(flat) % size)).chunk(size)[rank]
            differences.append((flat - shard).abs().max().item())

    for step in range(STEPS):
        for micro in range(micro_batches):
            for other in range(size):
                out = bare(tokens(step, micro, other))
                (out.square().sum() / size).backward()
            model(tokens(step, micro, rank)).square().sum().backward()
        compare(
            [[p.grad for p in b.parameters()] for b in bare],
            [shard.grad for shard in model.shards],
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare([list(b.parameters()) for b in bare], model.shards)
        with torch.no_grad():
            same = bare(tokens(step, 0, 0)) - model(tokens(step, 0, 0))
        differences.append(same.abs().max().item())
    assert storages(model.fulls) == 0
    return max(differences)


@pytest.mark.verifies(PREFETCH)
@pytest.mark.parametrize("members", [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 3]])
def test_a_chain_with_prefetch_equals_one_process(world, members):
    for micro_batches in (1, 2):
        found = world(4).run(chain_steps, members, micro_batches)
        assert [r for r in range(4) if found[r] is not None] == members
        assert max(found[r] for r in members) < 1e-12


def prefetched():
    """What a step does in order: gathers begun, waited for, blocks computed."""
    model = FullyShardedPrefetch(chain(torch.float32))
    begin, events, whole = prefetch_file._all_gather, [], []

    class Noted:
        def __init__(self, number, work):
            self.number, self.work = number, work

        def wait(self):
            events.append(f"wait {self.number}")
            self.work.wait()

    def noted(full, own, group=None, async_op=False):
        assert async_op
        (number,) = [
            i for i, s in enumerate(model.shards) if s.data_ptr() == own.data_ptr()
        ]
        events.append(f"gather {number}")
        whole.append(sum(f.untyped_storage().nbytes() > 0 for f in model.fulls))
        return Noted(number, begin(full, own, group=group, async_op=True))

    for number, block in enumerate(model.blocks):
        block.register_forward_hook(
            lambda *_, number=number: events.append(f"compute {number}")
        )
    with replaced(prefetch_file, "_all_gather", noted):
        loss = model(tokens(0, 0, dist.get_rank())).square().sum()
        events.append("backward")
        loss.backward()
    return events, max(whole), storages(model.fulls)


@pytest.mark.verifies(PREFETCH)
def test_the_next_gather_is_under_way_while_a_block_computes(world):
    forward, last = [], 4
    for number in range(last + 1):
        begun = [0, 1] if number == 0 else [number + 1] if number < last else []
        forward += [f"gather {n}" for n in begun]
        forward += [f"wait {number}", f"compute {number}"]
    backward = [f"gather {last}", f"gather {last - 1}", f"wait {last}"]
    for number in range(last - 1, -1, -1):
        backward += [f"gather {number - 1}"] * (number > 0) + [f"wait {number}"]
    for events, most, left in world(2).run(prefetched):
        assert events == [*forward, "backward", *backward]
        assert (most, left) == (2, 0)
