"""What several ranks hold: mirrored copies, tied embeddings; and overlapped pairs."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.devices import randint
from tests.pipeline_parallel.pipelines import (
    LIKE,
    WIDTH,
    Layer,
    batch,
    dense_loss,
    layers,
    make,
    own,
    squares,
    worst_gradient,
)  # fmt: skip
from xtrain.cluster.per_rank import replaced
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage, shared
from xtrain.pipeline_parallel.micro_batch import micro_batches
from xtrain.pipeline_parallel.shared import fingerprint, first_stage
from xtrain.pipeline_parallel.shared_exchange import Exchange
from xtrain.schedules import with_reductions
from xtrain.testing import expect_error

ROWS = 9


def whole(tensor: Tensor) -> list[list[float]]:
    """The tensor of every rank."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, tensor.detach().flatten().tolist())
    return every


def train_mirrored(name: str) -> dict[str, object]:
    """Three steps of AdamW, one layer without any gradient."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    schedule = make(name, ranks, 2 * ranks)
    modules = layers(ranks)
    for module in modules:
        module.unused = nn.Parameter(torch.ones(3, dtype=LIKE))
    reference = copy.deepcopy(modules)
    stages = own(modules, schedule, rank)
    runner = PipelineRunner(stages, schedule, squares)
    optimizers = [
        torch.optim.AdamW([p for m in some for p in m.parameters()], lr=0.1)
        for some in (stages, reference)
    ]
    m = schedule.micro_batches
    apart = 0.0
    for step in range(3):
        inputs, targets = batch(2 * m + 1, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        dense_loss(reference, micro_batches(inputs, m), micro_batches(targets, m))
        runner.step(inputs, targets)
        for stage in stages:
            apart = max(apart, worst_gradient(stage.module, reference[stage.index]))
        for optimizer in optimizers:
            optimizer.step()
    weights = {s.index: s.module.up.weight for s in stages}
    copies = whole(torch.stack([weights[min(weights)], weights[max(weights)]]))
    return {
        "gradients": apart,
        "bit-equal": copies[rank] == copies[ranks - 1 - rank],
        "unused": all(s.module.unused.grad is None for s in stages),
        "undecayed": all(bool((s.module.unused == 1).all()) for s in stages),
    }


@pytest.mark.verifies(
    "xtrain.pipeline_parallel.shared:SharedGradients",
    "xtrain.pipeline_parallel.shared:held_by_name",
    "xtrain.pipeline_parallel.shared_exchange:Exchange",
)
def test_mirrored_copies_stay_equal_to_the_bit_and_train_as_one(world):
    for name in ("chimera", "dualpipe"):
        for result in world(4).run(train_mirrored, name):
            assert result["gradients"] < 1e-12
            assert result["bit-equal"]
            assert result["unused"]  # in one process it has no gradient, either
            assert result["undecayed"]


@pytest.mark.verifies("xtrain.pipeline_parallel.shared:first_stage")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_of_a_pair_of_mirrored_stages_one_is_summed_under_backwards(ranks):
    """The stage that both ranks have done first; more is computed after it."""
    schedule = make("dualpipe", ranks, 2 * ranks)
    for rank, order in enumerate(with_reductions(schedule).actions):
        early = first_stage(schedule, rank)
        assert early == first_stage(schedule, ranks - 1 - rank)
        at = [str(action) for action in order].index(f"{early}REDUCE")
        computed = [a for a in order[at:] if a.kind in ("B", "W", "BW")]
        assert {a.stage for a in computed} == {ranks - 1 - early}
    assert first_stage(make("one_f_one_b", ranks, 8), 0) is None


def buffers_and_times(bucket: int) -> dict[str, object]:
    """Of a step: how much is received beside gradients, and when sums began."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule, made = make("dualpipe", ranks, 2 * ranks), []

    class Recorded(Exchange):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            parts = [part for parts in self.parts.values() for part in parts]
            made.append((time.perf_counter(), sum(p.nbytes for p in parts)))

    stages = own(layers(ranks), schedule, rank)
    runner = PipelineRunner(stages, schedule, squares)
    with replaced(shared, "Exchange", Recorded), replaced(shared, "BUCKET", bucket):
        runner.step(*batch(4 * ranks))
    done = zip(runner.executed, runner.times, strict=True)
    ends = [end for action, (_, end) in done if action.kind in ("B", "W", "BW")]
    return {
        "early": [began < ends[-1] for began, _ in made],
        "buffers": [nbytes for _, nbytes in made],
        "gradients": sum(p.grad.nbytes for s in stages for p in s.parameters()),
    }


@pytest.mark.verifies("xtrain.pipeline_parallel.shared_exchange:Exchange")
def test_sums_of_mirrored_stages_begin_early_and_hold_less_than_their_gradients(world):
    for bucket in (1, 2**30):
        by_rank = world(4).run(buffers_and_times, bucket)
        for rank, found in enumerate(by_rank):
            other = by_rank[3 - rank]
            assert found["early"] == [True] + [False] * (len(found["early"]) - 1)
            both = sum(found["buffers"]) + sum(other["buffers"])
            assert both == found["gradients"]  # each rank has buffers for its half
            if bucket == 1:  # one parameter after the other
                late, most = found["buffers"][1:], found["gradients"] / 2
                assert len(late) > 2 and max(late) < most


class First(nn.Module):
    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Last(nn.Module):
    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.layer, self.weight = Layer().to(LIKE), weight

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h) @ self.weight.t()


def cross_entropy(logits: Tensor, target: Tensor):
    loss = nn.functional.cross_entropy(logits, target, reduction="sum")
    return loss, len(target)


def train_tied(name: str) -> list[float]:
    """How far loss and gradients are from the tied model in one process."""
    rank, schedule = dist.get_rank(), make(name, dist.get_world_size(), 4)
    torch.manual_seed(8)
    table = nn.Embedding(11, WIDTH).to(LIKE)
    middle = layers(schedule.stages - 2)
    modules = [First(table), *middle, Last(table.weight)]
    dense = copy.deepcopy(modules)
    modules[-1] = copy.deepcopy(modules[-1])  # a copy of the table on another rank
    if name == "zb_v":  # both ends on rank 0: one parameter
        modules[-1].weight = modules[0].table.weight
    assert dense[0].table.weight is dense[-1].weight
    tied = {0: modules[0].table.weight, schedule.stages - 1: modules[-1].weight}
    shared = {s: {"table": weight} for s, weight in tied.items()}
    stages = [
        PipelineStage(modules[s], s, schedule.stages, shared=shared.get(s))
        for s in schedule.stages_of(rank)
    ]
    runner = PipelineRunner(stages, schedule, cross_entropy)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        tokens, labels = randint(11, (2, ROWS), generator)
        cut = micro_batches(tokens, 4), micro_batches(labels, 4)
        for module in (*dense, *modules):
            module.zero_grad()
        wanted = dense_loss(dense, *cut, cross_entropy)
        found.append((runner.step(tokens, labels) - wanted).abs().item())
        found += [worst_gradient(s.module, dense[s.index]) for s in stages]
        with torch.no_grad():
            for module in (*dense, *modules):
                for parameter in module.parameters():
                    if parameter.grad is not None:  # tied ones are one parameter once
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    return found


@pytest.mark.verifies("xtrain.pipeline_parallel.shared:SharedGradients")
def test_tied_embeddings_have_the_gradient_of_the_tied_model(world):
    for name in ("one_f_one_b", "interleaved", "zb_v", "dualpipe"):
        for found in world(2).run(train_tied, name):
            assert max(found) < 1e-12, (name, found)


def begin_apart(tied: bool) -> None:
    rank, schedule = dist.get_rank(), make("one_f_one_b" if tied else "dualpipe", 2, 4)
    modules = layers(2)
    with torch.no_grad():
        modules[1].up.weight += rank
    shared = {"up": modules[rank].up.weight} if tied else {}
    stages = [
        PipelineStage(modules[s], s, 2, shared=shared) for s in schedule.stages_of(rank)
    ]
    PipelineRunner(stages, schedule, squares).step(*batch(8))


@pytest.mark.verifies("xtrain.pipeline_parallel.shared:fingerprint")
def test_copies_that_begin_with_other_numbers_are_refused_on_every_rank(world):
    match = "must begin with the same numbers"
    for tied in (True, False):
        expect_error(world(2), begin_apart, tied, match=match)
    numbers = torch.arange(6.0).view(2, 3)
    assert fingerprint(numbers) == fingerprint(numbers.clone())
    assert fingerprint(numbers) != fingerprint(numbers.flip(0))  # the same, permuted


# ----------------------------------------------------------------- overlapped pairs


class Halves(nn.Module):
    """Two layers; an overlapped pair runs the other's backward between the two."""

    def __init__(self, order: list[str], index: int, recompute: bool):
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.order, self.index, self.recompute = order, index, recompute

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def forward_with_backward(self, inputs, backward):
        self.order.append("first half")
        h = self.first(*inputs)
        assert isinstance(backward.module, Halves)
        assert len(backward.outputs) == len(backward.gradients)
        backward()
        self.order.append("second half")
        return self.second(h)


def overlap(name: str, recompute: bool) -> tuple[list[float], bool, int]:
    """Differences, whether each backward ran between two halves, how many did."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    schedule = make(name, ranks, 2 * ranks + 2)
    torch.manual_seed(9)
    order: list[str] = []
    modules = [Halves(order, s, recompute).to(LIKE) for s in range(schedule.stages)]
    reference = [nn.Sequential(*copy.deepcopy([m.first, m.second])) for m in modules]
    stages = [
        PipelineStage(modules[s], s, schedule.stages, recompute=recompute)
        for s in schedule.stages_of(rank)
    ]
    for stage in stages:
        weight = stage.module.first.up.weight
        weight.register_post_accumulate_grad_hook(lambda _: order.append("backward"))
    runner = PipelineRunner(stages, schedule, squares)
    m = schedule.micro_batches
    inputs, targets = batch(2 * m + 1)
    wanted = dense_loss(reference, micro_batches(inputs, m), micro_batches(targets, m))
    found = []
    for _ in range(2):
        order.clear()
        for parameter in runner.parameters:
            parameter.grad = None
        found.append((runner.step(inputs, targets) - wanted).abs().item())
        found += [worst_gradient(s.module, reference[s.index]) for s in stages]
    pairs = sum(action.under is not None for action in schedule.actions[rank])
    between = [
        order[at + 1 : at + 3] == ["backward", "second half"]
        for at, what in enumerate(order)
        if what == "first half"
    ]
    return found, len(between) == (0 if recompute else pairs) and all(between), pairs


def test_a_module_may_run_its_forward_and_anothers_backward_into_each_other(world):
    for name in ("dualpipe", "dualpipe_v"):
        for recompute in (False, True):
            for found, between, pairs in world(4).run(overlap, name, recompute):
                assert max(found) < 1e-12, (name, recompute, found)
                assert between
                assert pairs > 0


# ------------------------------------------------------------------------ recompute


class Noisy(nn.Module):
    """A layer with dropout that counts how often it is run."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.runs = Layer(), nn.Dropout(0.3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.drop(self.layer(x))


def recomputed(name: str) -> dict[str, object]:
    """The same step with and without recompute: bits, runs, bytes held."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = make(name, ranks, 4)
    inputs, targets = batch(9)
    seen: dict[bool, tuple] = {}
    for recompute in (False, True):
        torch.manual_seed(3)
        modules = [Noisy().to(LIKE) for _ in range(schedule.stages)]
        stages = [
            PipelineStage(modules[s], s, schedule.stages, recompute=recompute)
            for s in schedule.stages_of(rank)
        ]
        runner = PipelineRunner(stages, schedule, squares)
        torch.manual_seed(10 + rank)
        loss = runner.step(inputs, targets)
        runs = [stage.module.runs for stage in stages]
        gradients = [p.grad for p in runner.parameters]
        runner.evaluate(inputs, targets)
        again = [stage.module.runs for stage in stages]
        seen[recompute] = loss, gradients, runs, again
    plain, saved = seen[False], seen[True]
    m = 4
    return {
        "loss": torch.equal(plain[0], saved[0]),
        "gradients": all(map(torch.equal, plain[1], saved[1])),
        "runs": plain[2] == [m] * len(stages) and saved[2] == [2 * m] * len(stages),
        "evaluation": saved[3] == [3 * m] * len(stages),
    }


@pytest.mark.verifies("xtrain.pipeline_parallel.stage:PipelineStage")
def test_a_stage_may_be_run_once_more_before_its_backward(world):
    for name in ("one_f_one_b", "zb_h1", "zb_v"):
        for result in world(2).run(recomputed, name):
            assert [what for what, holds in result.items() if not holds] == [], name
