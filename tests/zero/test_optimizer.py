"""ZeroOptimizer where a program expects one of torch's optimizers."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from tests.training import batch_of, largest_difference, loss_of, make_model
from xtrain.testing import expect_error
from xtrain.zero import AdamW, LossScaler, ZeroOptimizer

MARKERS = "xtrain.zero.grad_scaler:Markers"
ZERO = "xtrain.zero.optimizer:ZeroOptimizer"
STEPS = 5
SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=6),
    "inner": lambda o: lr_scheduler.StepLR(getattr(o, "optimizer", o), 2, gamma=0.5),
}
READ = ("lr", "betas", "weight_decay")


def groups_of(model):
    """Two groups with options of their own, of named parameters."""
    named = list(model.named_parameters())
    norms = [pair for pair in named if "norm" in pair[0]]
    others = [pair for pair in named if "norm" not in pair[0]]
    return [{"params": norms, "weight_decay": 0.0}, {"params": others, "lr": 0.01}]


def train_with(optimizer, model, schedule, ranks):
    rates = []
    scheduler = SCHEDULES[schedule](optimizer)
    for step in range(STEPS):
        for rank in ranks:
            (loss_of(model, batch_of(step, 0, rank)) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates += [[group[key] for key in READ] for group in optimizer.param_groups]
        if step == 2:  # what one edits reaches the shards
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.3
    return rates


def scheduled(stage, schedule):
    rank = dist.get_rank()
    model = make_model(0)
    optimizer = ZeroOptimizer(groups_of(model), AdamW, stage=stage, lr=0.02)
    assert isinstance(optimizer, torch.optim.Optimizer)
    rates = train_with(optimizer, model, schedule, [rank])
    return rates, dict(model.state_dict())


@pytest.mark.verifies(MARKERS, ZERO)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", [1, 2])
def test_torchs_schedules_drive_the_shards(world, stage, schedule):
    size = 2
    bare = make_model(0)
    optimizer = torch.optim.AdamW(groups_of(bare), lr=0.02)
    expected = train_with(optimizer, bare, schedule, range(size))
    for rates, weights in world(size).run(scheduled, stage, schedule):
        assert rates == expected
        assert largest_difference(weights, dict(bare.state_dict())) < 1e-12


def steps_of(model, optimizer, steps):
    for step in steps:
        loss_of(model, batch_of(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(dtype, stage):
    """Six steps, and three, a state_dict through pickle, and three: the weights."""

    def make(seed):
        model = make_model(seed, dtype=dtype)
        groups = groups_of(model)
        return model, ZeroOptimizer(groups, torch.optim.AdamW, stage=stage, lr=0.02)

    straight, first, second = make(0), make(0), make(1)
    steps_of(*straight, range(6))
    steps_of(*first, range(3))
    first[1].param_groups[1]["lr"] = 0.02
    saved = pickle.loads(pickle.dumps(first[1].state_dict()))
    assert saved["shard"]["rank"] == dist.get_rank()
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(saved)
    assert second[1].param_groups[1]["lr"] == 0.02
    second[1].param_groups[1]["lr"] = 0.01
    steps_of(*second, range(3, 6))
    masters = [[b.master.clone() for b in o.buckets] for _, o in (straight, second)]
    assert all(map(torch.equal, *masters))
    return dict(straight[0].state_dict()), dict(second[0].state_dict())


@pytest.mark.verifies(MARKERS, ZERO)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_dict_brings_back_every_bit(world, dtype):
    """Masters are in it: bf16 weights alone would lose what they have added up."""
    for stage in (1, 2):
        for straight, again in world(2).run(resumed, dtype, stage):
            assert largest_difference(straight, again) == 0.0


def state_of_another(what):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(0, dtype=torch.bfloat16)
    optimizer = ZeroOptimizer(groups_of(model), AdamW)
    steps_of(model, optimizer, range(1))
    before = [b.master.clone() for b in optimizer.buckets]
    state = optimizer.state_dict()
    if what == "rank":
        states = [None] * size
        dist.all_gather_object(states, state)
        state = states[0]  # every rank loads rank 0's: right on one rank only
    elif what == "torch" and rank == 1:
        state = torch.optim.AdamW(model.parameters()).state_dict()
    elif what == "masters" and rank == 1:
        state["shard"]["masters"] = state["shard"]["masters"][:1]
    elif what == "groups" and rank == 1:
        state["param_groups"] = state["param_groups"][:1]
    try:
        optimizer.load_state_dict(state)
    finally:
        after = [b.master for b in optimizer.buckets]
        assert all(map(torch.equal, before, after))


@pytest.mark.verifies(MARKERS, ZERO)
@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("rank", "a state_dict of rank 0 of 2 ranks; this is rank 1 of 2"),
        ("torch", "a state_dict of rank None"),
        ("masters", "masters of shapes"),
        ("groups", r"groups of \[2\] shards in it, of \[2, 1\] here"),
    ],
)
def test_a_state_dict_of_another_rank_is_refused_on_every_rank(world, what, match):
    expect_error(world(2), state_of_another, what, match=match)


def with_late_parameters(stage):
    """Half of the model at first, the rest after two steps, from rank 0's values."""
    rank = dist.get_rank()
    model = make_model(3 + rank)
    early = [p for name, p in model.named_parameters() if "layers" not in name]
    late = [p for name, p in model.named_parameters() if "layers" in name]
    for parameter in late:
        parameter.requires_grad_(False)
    model.scale.copy_(make_model(3).scale)
    for mine, first in zip(late, late_ones(make_model(3)), strict=True):
        mine.data.copy_(first)  # frozen so far, and so the caller's
    optimizer = ZeroOptimizer(early, AdamW, stage=stage, lr=0.02)
    steps_of(model, optimizer, range(2))
    for parameter in late:
        parameter.requires_grad_(True)
        parameter.data += rank  # what rank 0 has counts
    added = {"params": late, "lr": 0.01}
    optimizer.add_param_group(added)
    freed = []
    late[0].register_post_accumulate_grad_hook(lambda p: freed.append(p.grad is None))
    steps_of(model, optimizer, range(2, 4))
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.01]
    assert all(p.grad is None for p in model.parameters())
    assert freed == [stage == 2] * 2  # taken in backward, not at its end
    return dict(model.state_dict())


def late_ones(model):
    return [p for name, p in model.named_parameters() if "layers" in name]


@pytest.mark.verifies(MARKERS, ZERO)
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_may_come_later(world, stage):
    size, bare = 2, make_model(3)
    late = late_ones(bare)
    early = [p for name, p in bare.named_parameters() if "layers" not in name]
    optimizer = torch.optim.AdamW(early, lr=0.02)
    for step in range(4):
        if step == 2:
            bare.zero_grad()
            optimizer.add_param_group({"params": late, "lr": 0.01})
        for rank in range(size):
            (loss_of(bare, batch_of(step, 0, rank)) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in world(size).run(with_late_parameters, stage):
        assert largest_difference(weights, dict(bare.state_dict())) < 1e-12


def amp_step(scaler, optimizer, model, batch, clip):
    scaler.scale(loss_of(model, batch)).backward()
    if clip:
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def scaled(stage, clip):
    """Steps with GradScaler; in the second an infinity in one element of rank 2's."""
    rank = dist.get_rank()
    model = make_model(0, dtype=torch.float32)
    model.register_parameter("gain", nn.Parameter(torch.ones((), dtype=torch.float64)))
    plain = make_model(0, dtype=torch.float32)
    plain.register_parameter("gain", nn.Parameter(torch.ones((), dtype=torch.float64)))
    optimizers = [
        ZeroOptimizer(m.parameters(), AdamW, stage=stage, lr=0.01, bucket_cap_mb=2**-10)
        for m in (model, plain)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales, bad = [], False

    def overflow(grad):
        grad = grad.clone()
        grad.view(-1)[-1] = float("inf") if bad else grad.view(-1)[-1]
        return grad

    hidden = model.layers[1].mlp.down_proj.weight
    hidden.register_hook(overflow)
    owners = 0
    for step in range(5):
        bad = step == 1 and rank == 2
        batch = batch_of(step, 0, rank)
        before = [p.detach().clone() for p in model.parameters()]
        if step == 1:  # whose shard the infinity comes to: one rank's alone
            scaler.scale(loss_of(model, batch)).backward()
            owners = sum(bool(g.isinf().any()) for g in optimizers[0].gradients)
            optimizers[0].zero_grad()
        amp_step(scaler, optimizers[0], model, batch, clip)
        scales.append(scaler.get_scale())
        if step == 1:
            assert all(map(torch.equal, before, model.parameters()))
            continue
        loss_of(plain, batch).backward()
        if clip:
            optimizers[1].clip_grad_norm_(1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()
    weights = [dict(m.state_dict()) for m in (model, plain)]
    return scales, owners, largest_difference(*weights), weights[0]


@pytest.mark.verifies(MARKERS, ZERO)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
def test_torchs_grad_scaler_decides_for_all_ranks(world, stage, clip):
    """An infinity in one rank's shard: all skip, all halve, and then go on alike."""
    results = world(3).run(scaled, stage, clip)
    assert sorted(owners for _, owners, *_ in results) == [0, 0, 1]
    for scales, _, difference, weights in results:
        assert scales == [1024, 512, 512, 512, 1024]
        assert difference < 1e-6
        assert largest_difference(weights, results[0][3]) == 0.0


def norm_of_the_groups(stage):
    model = make_model(0)
    optimizer = ZeroOptimizer(model.parameters(), AdamW, stage=stage)
    loss_of(model, batch_of(0, 0, 0)).backward()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(params, 1.0)


@pytest.mark.verifies(ZERO)
def test_torchs_clipping_of_the_groups_is_refused(world):
    for stage in (1, 2):
        expect_error(
            world(2),
            norm_of_the_groups,
            stage,
            error=RuntimeError,
            match="one rank's shards: use ZeroOptimizer.clip_grad_norm_",
        )


def as_an_optimizer():
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ZeroOptimizer([parameter], torch.optim.SGD, lr=0.5, momentum=0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(parameter[0].item()))
    optimizer.register_step_post_hook(lambda *_: calls.append(parameter[0].item()))

    def closure():
        optimizer.zero_grad()
        loss = (parameter * (1 + rank)).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 4.0 * (1 + rank)
    assert calls == [1.0, 0.25]
    assert optimizer.step() is None
    assert optimizer.defaults["momentum"] == 0.5
    assert optimizer.state is optimizer.optimizer.state
    assert len(optimizer.state) == 1  # markers have none
    for refused in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="keep its state_dict"):
            refused(optimizer)
    with pytest.raises(ValueError, match="in the groups twice"):
        optimizer.add_param_group({"params": parameter})


@pytest.mark.verifies(ZERO)
def test_closures_hooks_and_copies(world):
    world(2).run(as_an_optimizer)


def own_scaler_after_theirs():
    """Our scaler over the same gradients; the markers have no elements."""
    parameter = nn.Parameter(torch.ones(5, dtype=torch.float16))
    optimizer = ZeroOptimizer([parameter], AdamW, lr=0.1)
    parameter.sum().backward()
    assert [len(g) for g in optimizer.gradients] == [3]
    assert LossScaler(2.0).unscale(optimizer.gradients)


@pytest.mark.verifies(ZERO)
def test_gradients_are_the_shards_alone(world):
    world(2).run(own_scaler_after_theirs)
