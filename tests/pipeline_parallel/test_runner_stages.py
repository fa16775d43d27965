"""Whatever a stage takes and returns, the pipeline equals one process."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.devices import NCCL, device_type, randint
from tests.pipeline_parallel.pipelines import (
    LIKE,
    WIDTH,
    Layer,
    batch,
    chain,
    dense_loss,
    make,
    own,
    squares,
    worst_gradient,
)  # fmt: skip
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger
from xtrain.pipeline_parallel import PipelineRunner, communicators
from xtrain.pipeline_parallel.message_header import HEADER
from xtrain.pipeline_parallel.micro_batch import micro_batches

RANKS = 3
TOLERANCE = 1e-11


class Calls(nn.Module):
    """A layer, and a function of its output and whatever else arrives."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = Layer(), function

    def forward(self, *inputs: Tensor):
        return self.function(self, *inputs)


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor):
        return self.table(tokens) + positions[:, None], positions


def with_positions(stage, h):
    positions, h = torch.arange(len(h)) % 5, stage.layer(h)
    return h, positions, h * 2  # the last is unused


def passed_on(stage, h, positions, _):
    return stage.layer(h) * (1 + positions[:, None]), positions, positions > 2


def at_the_end(stage, h, positions, late):
    return stage.layer(h) + positions[:, None] + late[:, None]


def several_dtypes(stage, h):
    h = stage.layer(h)
    return (
        h, h.bfloat16(), h.half(), h.float(), torch.complex(h, h * 2), h.argmax(-1),
        h.argmax(-1).to(torch.int8), h > 0, (h * 9).to(torch.uint8), h.sum(),
    )  # fmt: skip


def all_added(stage, h, b16, f16, f32, z, *rest):
    more = sum(r.to(LIKE).abs().sum() for r in rest)
    return stage.layer(h + b16 + f16 + f32 + (z * z.conj()).real) + more


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def empty_beside(stage, h):
    h = stage.layer(h)
    return h, h[:, :0], h.new_empty(0, 3)


def ignores_the_rest(stage, h, *rest):
    return stage.layer(h) + sum(r.sum() for r in rest)


def cases() -> dict[str, tuple]:
    """(modules, inputs, targets, loss)"""
    x, y = batch(7)
    tokens = randint(11, (7,), torch.Generator().manual_seed(1))
    weighted = (y, torch.arange(7.0, dtype=LIKE))

    def twice(stage, h):
        h = stage.layer(h)
        return [h, h]

    def weigh(output, target):
        y, weight = target
        return ((output - y).square().sum(-1) * weight).sum(), weight.sum()

    plain = [
        ("identity", [Layer(), nn.Identity(), Layer()]),
        ("identity first", [nn.Identity(), nn.Identity(), Layer()]),
        ("identity last", [Layer(), Layer(), nn.Identity()]),
        ("no parameters", [Layer(), nn.Tanh(), Layer()]),
        ("transposed", [Calls(lambda s, h: s.layer(h).t()),
                        Calls(lambda s, h: s.layer(h.t()).t()),
                        Calls(lambda s, h: s.layer(h.t()))]),
        ("view of the input", [Calls(lambda s, h: (s.layer(h), h[:, :2])),
                               Calls(lambda s, h, v: (h, v[:, :1], s.layer(h)[:, 1:])),
                               Calls(lambda s, h, v, w: s.layer(h) + v + w.sum())]),
        ("one tensor twice", [Calls(twice), Calls(lambda s, a, b: s.layer(a) * b),
                              Layer()]),
        ("integers", [Calls(with_positions), Calls(passed_on), Calls(at_the_end)]),
        ("empty", [Calls(empty_beside), Calls(ignores_the_rest), Layer()]),
        ("dtypes", [Calls(several_dtypes), Calls(all_added), Layer()]),
        ("frozen first", [frozen(Layer()), frozen(Layer()), Layer()]),
        ("frozen middle", [Layer(), frozen(Layer()), Layer()]),
        ("frozen last", [Layer(), Layer(), frozen(Layer())]),
        ("frozen everywhere", [frozen(Layer()) for _ in range(3)]),
    ]  # fmt: skip
    found = {name: (modules, x, y, squares) for name, modules in plain}
    tail = [Calls(lambda s, h, p: (s.layer(h), p)), Calls(lambda s, h, p: s.layer(h))]
    found["tuples"] = ([Embeds(), *tail], (tokens, tokens % 3), weighted, weigh)
    found["lists"] = ([Embeds(), *tail], [tokens, tokens % 3], list(weighted), weigh)
    return found


def kinds_of_stages(schedule_name: str) -> dict[str, list[float]]:
    """How far this rank is from one process, by kind: loss and gradients, two steps."""
    schedule, rank = make(schedule_name, RANKS, 3), dist.get_rank()
    found = {}
    torch.manual_seed(1)
    for kind, (modules, inputs, targets, loss_fn) in cases().items():
        modules = [module.to(LIKE) for module in modules]
        reference = copy.deepcopy(modules)
        cut = micro_batches(inputs, 3), micro_batches(targets, 3)
        wanted = dense_loss(reference, *cut, loss_fn)
        stages = own(modules, schedule, rank)
        pipeline = PipelineRunner(stages, schedule, loss_fn)
        apart = []
        for _ in range(2):
            for parameter in pipeline.parameters:
                parameter.grad = None
            loss = pipeline.step(inputs, targets)
            apart.append((loss - wanted).abs().item() / (1 + wanted.abs().item()))
            for stage in stages:
                apart.append(worst_gradient(stage.module, reference[stage.index]))
        loss = pipeline.evaluate(inputs, targets)
        apart.append((loss - wanted).abs().item() / (1 + wanted.abs().item()))
        found[kind] = apart
    return found


@pytest.mark.verifies(
    "xtrain.pipeline_parallel.stage:PipelineStage",
    "xtrain.pipeline_parallel.message_header:write_header",
    "xtrain.pipeline_parallel.message_header:read_header",
    "xtrain.pipeline_parallel.micro_batch:MicroBatch",
)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_stages_may_take_and_return_any_tensors(world, name):
    for result in world(RANKS).run(kinds_of_stages, name):
        assert len(result) == 16
        for kind, apart in result.items():
            assert max(apart) < TOLERANCE, (kind, apart)


# --------------------------------------------------------------- how a step is called


def headers_and_losses(rows: list[int]) -> list[list[float]]:
    """[loss, loss of one process, headers sent] of steps with so many rows."""
    schedule, rank = make("one_f_one_b", 3, 2), dist.get_rank()
    torch.manual_seed(2)
    modules = [Layer().to(LIKE) for _ in range(3)]
    pipeline = PipelineRunner(own(modules, schedule, rank), schedule, squares)
    found = []
    for count in rows:
        inputs, targets = batch(count)
        wanted = dense_loss(
            modules, micro_batches(inputs, 2), micro_batches(targets, 2)
        )
        with CommLedger() as ledger:
            loss = pipeline.step(inputs if rank == 0 else None, targets)
        sent = [e.nbytes for e in ledger.events if e.kind == "send"]
        found.append([loss.item(), wanted.item(), sent.count(8 * HEADER)])
    return found


@pytest.mark.verifies("xtrain.pipeline_parallel.agreement:agree_to_begin")
def test_headers_are_sent_when_the_shape_of_the_batch_changes_and_only_then(world):
    rows = [4, 4, 6, 6, 4, 2]
    for rank, steps in enumerate(world(3).run(headers_and_losses, rows)):
        assert [h for *_, h in steps] == [
            0 if rank == 2 else n for n in (2, 0, 2, 0, 2, 2)
        ]
        for loss, wanted, _ in steps:
            assert abs(loss - wanted) < 1e-12


def other_ways_to_call() -> dict[str, bool]:
    """What holds, by name."""
    schedule, rank = make("one_f_one_b", 2, 3), dist.get_rank()
    torch.manual_seed(4)
    modules = [Layer().to(LIKE) for _ in range(2)]
    reference = copy.deepcopy(modules)
    stages = own(modules, schedule, rank)
    pipeline = PipelineRunner(stages[0], schedule, squares)  # one, not a list
    (parameter, *_), (inputs, targets) = pipeline.parameters, batch(7)
    cut = micro_batches(inputs, 3), micro_batches(targets, 3)
    wanted = dense_loss(reference, *cut)
    found = {}

    def right(times: float = 1.0) -> bool:
        mine, other = stages[0].module.parameters(), reference[rank].parameters()
        pairs = zip(mine, other, strict=True)
        return all(torch.allclose(a.grad, times * b.grad, atol=1e-12) for a, b in pairs)

    with torch.no_grad():
        found["under no_grad"] = torch.allclose(pipeline.step(inputs, targets), wanted)
        found["leaves no_grad"] = not torch.is_grad_enabled()
    found["gradients"] = right()
    pipeline.step(inputs, targets)
    found["gradients are added"] = right(2.0)
    again = PipelineRunner(stages, make("gpipe", 2, 3), squares)
    again.step(inputs, targets)
    found["two runners, one group"] = right(3.0)
    pipeline.step(inputs, targets)
    found["and the first once more"] = right(4.0)
    only = torch.zeros_like(targets)
    before = parameter.grad.clone()
    loss = pipeline.step(inputs, only)  # `squares` counts no row of these
    found["a count of 0"] = loss.item() == 0.0 and torch.equal(parameter.grad, before)
    with torch.inference_mode():
        found["evaluated"] = torch.allclose(pipeline.evaluate(inputs, targets), wanted)
    outputs = pipeline.forward(inputs)
    whole = chain(reference, (inputs,))
    found["outputs"] = len(outputs) == (3 if rank else 0) and all(
        torch.allclose(output, whole.tensor_split(3)[i])
        for i, output in enumerate(outputs)
    )
    found["evaluation leaves gradients"] = torch.equal(parameter.grad, before)
    one_row_each = batch(3)
    found["a row each"] = torch.allclose(
        pipeline.step(*one_row_each),
        dense_loss(reference, *(micro_batches(t, 3) for t in one_row_each)),
    )
    return found


@pytest.mark.verifies("xtrain.pipeline_parallel.runner:PipelineRunner")
def test_gradients_are_added_and_nothing_else_depends_on_the_caller(world):
    for result in world(2).run(other_ways_to_call):
        assert [name for name, holds in result.items() if not holds] == []


def switches() -> dict[str, float]:
    """Dropout in train and eval mode, BatchNorm's buffers, autocast."""
    schedule, rank, m = make("one_f_one_b", 2, 3), dist.get_rank(), 3
    torch.manual_seed(6)
    modules = [
        nn.Sequential(Layer(), nn.Dropout(0.5)),
        nn.Sequential(nn.BatchNorm1d(WIDTH), Layer()),
    ]
    modules = [module.to(LIKE) for module in modules]
    reference = copy.deepcopy(modules)
    pipeline = PipelineRunner(own(modules, schedule, rank), schedule, squares)
    inputs, targets = batch(8)
    cut = micro_batches(inputs, m), micro_batches(targets, m)
    torch.manual_seed(7)  # dropout is on rank 0 only, in order of micro-batches
    trained = pipeline.step(inputs, targets)
    torch.manual_seed(7)
    found = {"train": (trained - dense_loss(reference, *cut)).abs().item()}
    found["gradients"] = worst_gradient(modules[rank], reference[rank])
    for name, buffer in modules[1].named_buffers():
        if rank == 1:
            apart = buffer - reference[1].get_buffer(name)
            found[f"buffer {name}"] = apart.abs().max().item()
            buffers = modules[1].state_dict()
    if rank == 0:  # what rank 1 has trained is not here
        modules[1].load_state_dict(reference[1].state_dict())
    for module in (*modules, *reference):
        module.eval()
    wanted = dense_loss(reference, *cut)
    found["eval"] = (pipeline.evaluate(inputs, targets) - wanted).abs().item()
    found["step in eval"] = (pipeline.step(inputs, targets) - wanted).abs().item()
    if rank == 1:
        found["buffers stay"] = float(
            any(
                not torch.equal(v, modules[1].state_dict()[n])
                for n, v in buffers.items()
            )
        )
    for module in (*modules, *reference):
        module.float().zero_grad()
    low = [t.float() for t in (inputs, targets)]
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        loss = pipeline.step(*low)
        pairs = zip(*(micro_batches(t, m) for t in low), strict=True)
        sums = [squares(chain(reference, (x,)), y) for x, y in pairs]
        count = sum(n for _, n in sums)
        for total, _ in sums:
            total.backward()  # bf16 rounds the gradients of sums, not of means
    for parameter in reference[rank].parameters():
        parameter.grad /= count
    found["autocast"] = abs(loss.item() - sum(t.item() for t, _ in sums) / count) / 1e6
    found["autocast gradients"] = worst_gradient(modules[rank], reference[rank]) / 1e6
    loss = pipeline.step(*low)  # no autocast: other dtypes travel
    wanted = dense_loss(reference, *(micro_batches(t, m) for t in low))
    found["without autocast"] = (loss - wanted).abs().item() / 1e6
    return found


def test_dropout_batch_norm_and_autocast_are_those_of_one_process(world):
    for result in world(2).run(switches):
        assert {n: v for n, v in result.items() if not v < 1e-12} == {}


def in_a_sub_group(separate: bool) -> dict[str, float]:
    """Two pipelines of two ranks at a time, each with a batch of its own."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, place = pipelines[rank % 2], rank // 2
    found = {}
    for name in ("one_f_one_b", "zb_v", "dualpipe"):
        schedule = make(name, 2, 4)
        torch.manual_seed(5)
        modules = [Layer().to(LIKE) for _ in range(schedule.stages)]
        reference = copy.deepcopy(modules)
        inputs, targets = batch(9, seed=rank % 2)
        stages = own(modules, schedule, place)
        with replaced(communicators, "follows_nccl", lambda *_: separate):
            pipeline = PipelineRunner(stages, schedule, squares, group)
        assert bool(pipeline._messages._lanes) == separate
        cut = micro_batches(inputs, 4), micro_batches(targets, 4)
        wanted = dense_loss(reference, *cut)
        losses = [pipeline.step(inputs, targets) for _ in range(2)]
        for parameter in pipeline.parameters:
            parameter.grad /= 2
        found[name] = max((loss - wanted).abs().item() for loss in losses)
        for stage in stages:
            apart = worst_gradient(stage.module, reference[stage.index])
            found[f"{name}, stage {stage.index}"] = apart
    return found


@pytest.mark.verifies("xtrain.pipeline_parallel.communicators:lane_groups")
@pytest.mark.parametrize("separate", [False, True])
def test_a_pipeline_may_be_part_of_the_ranks_and_send_each_way_in_its_own_group(
    world, separate
):
    if not separate and world(4).backend in NCCL:
        pytest.skip("with one queue for both ways ranks wait for each other")
    for result in world(4).run(in_a_sub_group, separate):
        assert {n: v for n, v in result.items() if not v < 1e-12} == {}
        assert not any(map(math.isnan, result.values()))
