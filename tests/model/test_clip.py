"""The gradients' norm over tensor ranks: every part of the full model once."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.model.mesh_training import (
    WRAPPERS,
    Layout,
    MeshTraining,
    batch,
    check_training,
    one_process,
)
from tests.model.twins import MIXTRAL, config_of
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel
from xtrain.testing import expect_error
from xtrain.zero import AdamW, Muon, ZeroOptimizer, clip_sharded_grad_norm_

CLIP = (
    "xtrain.zero.clip:clip_sharded_grad_norm_",
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.parameters:placement_of",
)
WRAPPED = (
    *CLIP,
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
KEYS = {"num_key_value_heads": 2}
ONE_KEY_TIED = {"num_key_value_heads": 1, "tie_word_embeddings": True}
LIMIT = 0.3  # below the norm of every step


@pytest.mark.verifies(*CLIP)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_norm_of_a_cut_model_is_that_of_the_full_one(world, size):
    layout = Layout("plain", 1, size)
    runs = [(layout, {"sequence_parallel": cut}) for cut in (False, True)]
    check_training(world, runs, ONE_KEY_TIED, LIMIT)


@pytest.mark.verifies(*WRAPPED)
def test_with_data_ranks_besides_the_norm_is_that_of_the_full_model(world):
    for data, tensor in ((2, 2), (1, 4), (4, 1)):
        runs = [(Layout(wrapper, data, tensor), {}) for wrapper in WRAPPERS]
        check_training(world, runs, KEYS, LIMIT)


def counted_on_every_rank():
    """What goes wrong without the table: each part that is held twice counts twice."""
    run = MeshTraining(Layout("plain", 1, 4), KEYS)
    run.accumulate(0)
    run.bare.sync_gradients()
    gradients = [p.grad for p in run.bare.parameters()]
    local = torch.cat([g.flatten() for g in gradients]).norm().item()
    all_of_them = clip_sharded_grad_norm_(gradients, 1e9).item()
    return local, all_of_them, run.clip(LIMIT).item()


def test_a_norm_without_the_table_is_another(world):
    """Each rank's own differs by rank, the sum of all counts replicas often."""
    _, (right,), _ = one_process(KEYS, 1, max_norm=LIMIT)
    found = world(4).run(counted_on_every_rank)
    assert len({local for local, *_ in found}) > 1
    for local, all_of_them, ours in found:
        assert local < 0.99 * right and all_of_them > 1.01 * right
        assert math.isclose(ours, right, rel_tol=1e-13)


def bad_limits(max_norm):
    run = MeshTraining(Layout("plain", 1, 2), KEYS)
    run.accumulate(0)
    run.bare.clip_grad_norm_(max_norm[dist.get_rank()])


@pytest.mark.verifies(*CLIP[:2])
def test_limits_that_differ_or_are_negative_are_refused_on_every_rank(world):
    for limits in ([1.0, 2.0], [-1.0, -1.0]):
        expect_error(
            world(2), bad_limits, limits, error=ValueError, match="by rank: .*1.0"
        )


def without_the_module():
    """ZeRO over data alone would take a tensor rank's norm for the model's."""
    mesh = init_mesh((1, 2), ("data", "tensor"))
    for on_meta in (False, True):
        here = torch.get_default_device()
        model = XtrainModel(config_of(**KEYS), mesh, device="meta" if on_meta else here)
        if on_meta:
            model.to_empty(device=here)
            model.reset_parameters()
        optimizer = ZeroOptimizer(
            model.parameters(), AdamW, process_group=mesh["data"].get_group()
        )
        model.loss(*batch(0)).backward()
        with pytest.raises(
            ValueError, match="clip_grad_norm_.max_norm, module. counts"
        ):
            optimizer.clip_grad_norm_(LIMIT)
        optimizer.clip_grad_norm_(LIMIT, model)


def which_are_slices():
    """Experts over ranks make slices, a tensor axis of one rank does not."""
    for shape, axes, changes, rule in (
        ((1, 2), ("expert_data", "expert"), MIXTRAL, "these parameters are slices"),
        ((2, 1), ("data", "tensor"), KEYS, None),
    ):
        model = XtrainModel(config_of(**changes), init_mesh(shape, axes))
        optimizer = ZeroOptimizer(model.parameters(), AdamW)
        model.loss(*batch(0)).backward()
        with pytest.raises(ValueError, match=rule) if rule else nullcontext():
            optimizer.clip_grad_norm_(LIMIT)


@pytest.mark.verifies(
    "xtrain.comm.wrapper_rules:check_not_slices",
    "xtrain.comm.wrapper_rules:mark_as_slices",
)
def test_only_parameters_that_are_cut_are_slices(world):
    world(2).run(which_are_slices)


@pytest.mark.verifies(
    "xtrain.comm.wrapper_rules:check_not_slices",
    "xtrain.zero.optimizer:ZeroOptimizer",
)
def test_zero_refuses_to_clip_slices_without_their_module(world):
    world(2).run(without_the_module)


def by_the_model():
    """ZeRO leaves it no gradients, FSDP shards: its norm would be another."""
    for wrapper, owner in (
        ("zero 1", r"ZeroOptimizer shards .* optimizer\.clip_grad_norm_\(max_norm, m"),
        ("zero 2", r"ZeroOptimizer shards .* optimizer\.clip_grad_norm_\(max_norm, m"),
        ("fsdp", r"FullyShardedDataParallel shards .* fsdp\.clip_grad_norm_"),
    ):
        run = MeshTraining(Layout(wrapper, 2, 1), KEYS)
        run.accumulate(0)
        with pytest.raises(ValueError, match=owner):
            run.bare.clip_grad_norm_(LIMIT)
        assert run.clip(LIMIT) > 2 * LIMIT


def muon_shares_them():
    """Its ranks have no sums in .grad until it has reduced them."""
    model = XtrainModel(config_of(), init_mesh((2,), ("data",)))
    Muon.of(model, gradient_reduction="sum")
    with pytest.raises(ValueError, match="Muon shards the gradients"):
        model.clip_grad_norm_(LIMIT)


@pytest.mark.verifies("xtrain.model.gradient_sums:check_not_sharded")
def test_a_model_refuses_to_clip_what_muon_reduces(world):
    world(2).run(muon_shares_them)


@pytest.mark.verifies(
    "xtrain.model.gradient_sums:check_not_sharded",
    "xtrain.model.decoder:XtrainModel",
)
def test_a_model_refuses_to_clip_what_a_wrapper_shards(world):
    world(2).run(by_the_model)


def a_nan_on_one_rank(wrapper):
    run = MeshTraining(Layout(wrapper, 2, 2), KEYS)
    run.accumulate(0)
    run.bare.sync_gradients(skip=() if wrapper == "plain" else ("data",))
    if wrapper.startswith("zero"):
        gradients = run.optimizer.gradients
    else:
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    if dist.get_rank() == 3:
        next(g for g in gradients if g.numel()).view(-1)[0] = math.nan
    norm = run.clip(LIMIT)
    return norm.item(), [bool(g.isnan().any()) for g in gradients if g.numel()]


@pytest.mark.verifies(*WRAPPED)
@pytest.mark.parametrize("wrapper", ["zero 1", "zero 2", "fsdp"])
def test_a_nan_of_one_rank_reaches_all(world, wrapper):
    for norm, are_nan in world(4).run(a_nan_on_one_rank, wrapper):
        assert math.isnan(norm) and all(are_nan)
