"""The classic bugs of lc8: broken twins fail the checks that the right code passes."""

import pytest
import torch
import torch.distributed as dist
from snippets.wrong.lc8 import (
    all_ranks,
    batch_by_rank,
    clip_early,
    data_from_0,
    experts_summed,
    mesh_order,
    only_rank_0,
    order_by_rank,
    rate_from_0,
    without_context,
)

from tests.snippets.gallery import all_fail, drawn, ranks, same
from tests.train.corpora import documents_of, file_of
from xtrain.checkpoint import Shard, load_checkpoint, save_checkpoint
from xtrain.comm import init_mesh
from xtrain.model.parameters import is_summed_over
from xtrain.train.batches import Batches
from xtrain.train.rates import Rate, rate_at
from xtrain.train.samples import Samples
from xtrain.train.tokens import TokenFile
from xtrain.zero.clip import clip_sharded_grad_norm_

SUMMED_OVER = "xtrain.model.parameters:is_summed_over"
BATCHES = "xtrain.train.batches:Batches"
RATE_AT = "xtrain.train.rates:rate_at"
SAVE = "xtrain.checkpoint.training_state:save_checkpoint"
LOAD = "xtrain.checkpoint.training_state:load_checkpoint"
MESHES = ((2, 2), (1, 2), (2, 1))
"""Both axes together, and one after the other."""


def sizes_of(shape) -> int:
    return shape[0] * shape[1]


# ------------------------------------------------------------------ batches and groups


def loss_is_that_of_one_process(choose, shape) -> None:
    mesh = init_mesh(shape, ("data", "tensor"))
    rows, weights = drawn(1, 8, 4), (drawn(2, 4, 6), drawn(3, 6, 4))
    right = ((rows @ weights[0]).relu() @ weights[1]).square().mean()
    same(batch_by_rank.loss(rows, weights, mesh, choose), right)


def test_ranks_of_a_tensor_group_read_one_batch(worlds):
    check, twin = loss_is_that_of_one_process, batch_by_rank
    for shape in MESHES:
        worlds[sizes_of(shape)].run(check, twin.by_data_rank, shape)
    worlds[2].run(check, twin.by_rank, (2, 1))  # without tensor ranks it is right
    for shape in ((1, 2), (2, 2)):
        all_fail(worlds[sizes_of(shape)], check, twin.by_rank, shape)


def gradient_of_columns(rule, shape) -> None:
    mesh = init_mesh(shape, ("data", "tensor"))
    rows, weight = drawn(1, 8, 4), drawn(2, 4, 6)
    right = all_ranks.columns(2 * rows.T @ rows @ weight / len(rows), mesh)
    same(all_ranks.gradient(rows, weight, mesh, rule), right)


def test_gradients_are_summed_over_the_data_group(worlds):
    check, twin = gradient_of_columns, all_ranks
    for shape in MESHES:
        worlds[sizes_of(shape)].run(check, twin.of_data, shape)
    for rule in (twin.of_all, twin.by_all):
        worlds[2].run(check, rule, (2, 1))
        for shape in ((1, 2), (2, 2)):
            all_fail(worlds[sizes_of(shape)], check, rule, shape)


def every_sample_once(seed_of, shape) -> None:
    """Ranks of a tensor group have the same ones."""
    mesh = init_mesh(shape, ("data", "tensor"))
    own = torch.tensor(order_by_rank.epoch(8, mesh, seed_of))
    found = [[torch.empty_like(own) for _ in range(size)] for size in shape]
    for parts, axis in zip(found, ("data", "tensor"), strict=True):
        dist.all_gather(parts, own, group=mesh[axis].get_group())
    assert sorted(torch.cat(found[0]).tolist()) == [*range(8)]
    assert all(torch.equal(part, own) for part in found[1])


def test_the_order_of_samples_is_drawn_from_one_seed(worlds):
    check, twin = every_sample_once, order_by_rank
    for shape in MESHES:
        worlds[sizes_of(shape)].run(check, twin.one_seed, shape)
        all_fail(worlds[sizes_of(shape)], check, twin.seed_of_rank, shape)


# --------------------------------------------------------------------- sums, and norms


def gradient_of_an_expert(rule, shape) -> None:
    mesh = init_mesh(shape, ("expert_data", "expert"))
    tokens, weights = drawn(1, *shape, 5, 3), drawn(2, shape[1], 3, 3)
    right = experts_summed.whole(tokens, weights)[mesh["expert"].get_local_rank()]
    same(experts_summed.gradient(tokens, weights, mesh, rule), right)


@pytest.mark.verifies(SUMMED_OVER)
def test_experts_are_summed_over_expert_data_alone(worlds):
    check, twin = gradient_of_an_expert, experts_summed
    for shape in MESHES:
        worlds[sizes_of(shape)].run(check, twin.over_copies, shape)
    worlds[2].run(check, twin.like_dense, (2, 1))  # of one expert rank
    for shape in ((1, 2), (2, 2)):
        all_fail(worlds[sizes_of(shape)], check, twin.like_dense, shape)
    of_experts = "layers.1.mlp.experts.up_proj"
    axes = ("expert_data", "expert", "context", "tensor")
    assert [is_summed_over(of_experts, axis) for axis in axes] == [1, 0, 1, 0]
    assert [is_summed_over("layers.1.mlp.router.weight", a) for a in axes] == [
        1, 1, 1, 0,
    ]  # fmt: skip


def weights_of_one_process(rule, shape) -> None:
    mesh = init_mesh(shape, ("data", "context"))
    x, weight = drawn(1, 4, 6, 3), drawn(2, 3, 3)
    right = weight.clone()
    for _ in range(3):
        right -= 0.1 * without_context.step(x, right) / 24
    same(without_context.train(x, weight, mesh, rule), right)


@pytest.mark.verifies(SUMMED_OVER)
def test_gradients_are_summed_over_context_ranks_too(worlds):
    check, twin = weights_of_one_process, without_context
    for shape in MESHES:
        worlds[sizes_of(shape)].run(check, twin.over_both, shape)
    worlds[2].run(check, twin.over_data, (2, 1))
    for shape in ((1, 2), (2, 2)):
        all_fail(worlds[sizes_of(shape)], check, twin.over_data, shape)
    assert is_summed_over("norm.weight", "context")


def clipped_as_one_process(rule, limit) -> None:
    rank, size = ranks()
    parts = [part.double() for part in clip_early.parts(size)]
    whole = sum(parts)
    right = whole * min(1.0, limit / whole.norm().item())
    found = rule(parts[rank].clone(), limit)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)  # torch's eps is 1e-6


def by_the_library(grad, limit):
    dist.all_reduce(grad)
    counts = [dist.get_rank() == 0]  # the sum is the same on all ranks
    clip_sharded_grad_norm_([grad], limit, None, counts)
    return grad


@pytest.mark.verifies("xtrain.zero.clip:clip_sharded_grad_norm_")
def test_gradients_are_clipped_after_the_sum(worlds):
    check, twin = clipped_as_one_process, clip_early
    for size in (1, 2, 3):
        for rule in (twin.after, by_the_library):
            worlds[size].run(check, rule, 1.0)
        worlds[size].run(check, twin.before, 100.0)  # where nothing is clipped
    worlds[1].run(check, twin.before, 1.0)
    for size in (2, 3):
        all_fail(worlds[size], check, twin.before, 1.0)


# ------------------------------------------------------------------------- checkpoints


def comes_back(rule, folder) -> None:
    whole = drawn(1, 4, 2)
    same(only_rank_0.restored(whole, rule, f"{folder}/{rule.__name__}"), whole)


def comes_back_in_the_library(folder) -> None:
    rank, size = ranks()
    whole, start = drawn(1, 4, 2), rank * 4 // size
    own = whole.chunk(size)[rank].clone()
    shards = [Shard("weight", (4, 2), (start, 0), own)]
    save_checkpoint(folder, 1, shards)
    own.zero_()
    load_checkpoint(folder, shards)
    same(own, whole.chunk(size)[rank])


@pytest.mark.verifies(SAVE, LOAD)
def test_every_rank_saves_the_slice_that_it_holds(worlds, tmp_path):
    for size in (1, 2, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        worlds[size].run(comes_back, only_rank_0.everyone, str(folder))
        worlds[size].run(comes_back_in_the_library, str(folder / "library"))
    worlds[1].run(comes_back, only_rank_0.first_alone, str(tmp_path))
    for size in (2, 4):
        all_fail(worlds[size], comes_back, only_rank_0.first_alone, str(tmp_path))


def loaded_on(axes, name, folder) -> None:
    whole = drawn(1, 4, 2)
    same(mesh_order.saved_and_loaded(whole, axes, name, folder), whole)


def test_a_file_is_named_by_its_slice_and_not_by_its_rank(worlds, tmp_path):
    one, other = ("data", "tensor"), ("tensor", "data")
    twin, cases = mesh_order, ((one, one), (one, other), (other, one))
    for n, axes in enumerate(cases):
        for name in (twin.by_slice, twin.by_rank):
            (folder := tmp_path / f"{n}-{name.__name__}").mkdir()
            if axes[0] != axes[1] and name is twin.by_rank:
                all_fail(worlds[4], loaded_on, axes, name, str(folder))
            else:
                worlds[4].run(loaded_on, axes, name, str(folder))


# ---------------------------------------------------------------- runs that go on


def each_once(seen, count: int) -> bool:
    return sorted(seen) == [*range(count)]


@pytest.mark.verifies(BATCHES)
def test_a_run_goes_on_with_the_samples_that_it_has_not_seen(tmp_path):
    twin = data_from_0
    for stop in (1, 4):
        assert each_once(twin.trained_on(12, 2, stop, twin.from_the_step), 12)
        assert not each_once(twin.trained_on(12, 2, stop, twin.anew), 12)
    assert each_once(twin.trained_on(12, 2, 6, twin.anew), 12)  # not resumed
    path = file_of(tmp_path / "few.tokens", documents_of([9, 2, 17, 30, 5])).path
    samples = Samples(TokenFile.open(path), 4, seed=5)
    whole = Batches(samples, 4)
    for start in (1, 3):
        resumed = Batches(samples, 4, start=start)
        for step in (start, start + 1):
            batch = next(resumed)
            assert batch.first == 4 * step
            assert torch.equal(batch.tokens, whole[step].tokens)


@pytest.mark.verifies(RATE_AT)
def test_a_learning_rate_is_that_of_the_step():
    twin, steps = rate_from_0, 10
    right = [min((step + 1) / 4, 1) for step in range(steps)]
    for stop in (2, 6):
        assert twin.rates(stop, steps, twin.of_the_step) == right
        assert twin.rates(stop, steps, twin.new_schedule) != right
    assert twin.rates(steps, steps, twin.new_schedule) == right  # not resumed
    spec = Rate(kind="constant", warmup=3)
    assert [rate_at(step, spec, steps) for step in range(steps)] == right
