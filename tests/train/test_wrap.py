"""What `wrap` derives from the mesh, and what it refuses."""

import pytest
import torch
import torch.distributed as dist

from tests.model.twins import batch, config_of
from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainModel
from xtrain.plan import Layout
from xtrain.schedules import gpipe
from xtrain.train import accumulate, make_mesh, make_model, wrap, wrapped_model
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

WRAP = "xtrain.train.wrap:wrap"


def ranks_of(group) -> list[int]:
    return dist.get_process_group_ranks(group)


def derived() -> None:
    """Ranks 0 to 3 are (data, tensor) (0, 0), (0, 1), (1, 0), (1, 1)."""
    layout = Layout(data=2, tensor=2)
    mesh, rank = make_mesh(layout), dist.get_rank()
    with_data = [rank % 2, rank % 2 + 2]
    for kind, around in (
        ("ddp", DistributedDataParallel),
        ("fsdp", FullyShardedDataParallel),
    ):
        model = wrap(make_model(config_of(), layout, mesh), mesh, kind)
        module = model.stages[0].module
        assert isinstance(module, around)
        assert ranks_of(module.process_group) == with_data
        assert module.gradient_reduction == "sum"
    model = wrap(make_model(config_of(), layout, mesh), mesh, "zero1")
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
    assert isinstance(optimizer, ZeroOptimizer) and optimizer.stage == 1
    assert ranks_of(optimizer.process_group) == with_data
    for kind, options, once in (
        ("zero1", {}, True),
        ("zero2", {}, False),
        ("zero2", {"reduce_at_end": True}, True),
    ):
        model = wrap(make_model(config_of(), layout, mesh), mesh, kind, **options)
        assert model.reduces_once == once


@pytest.mark.verifies(WRAP, "xtrain.train.wrap:wrapper")
def test_group_and_reduction_come_from_the_mesh(world):
    world(4).run(derived)


def contradicted() -> None:
    layout = Layout(data=2)
    mesh, config = make_mesh(layout), config_of()
    model = XtrainModel(config, mesh)
    for arguments, options, words in (
        ((model, mesh, "zero3"), {}, "kind='zero3' is none of none, ddp"),
        ((model, mesh, "ddp"), {"inner": 2}, "inner=2 of kind='ddp'"),
        ((model, mesh, "hsdp"), {}, "inner=None of kind='hsdp'"),
        ((model, init_mesh((2,), ("data",)), "ddp"), {}, "not the one that the model"),
    ):
        with pytest.raises(ValueError, match=words):
            wrap(*arguments, **options)
    stages = XtrainModel.stages(config, make_mesh(Layout(data=2)), gpipe(1, 1))
    with pytest.raises(ValueError, match="stages need the schedule"):
        wrap(stages, stages[0].module.mesh, "ddp")
    wrapped = wrap(model, mesh, "ddp")
    with pytest.raises(
        ValueError, match="neither an XtrainModel nor one of its stages"
    ):
        wrap([wrapped.stages[0]], mesh, "ddp", schedule=gpipe(1, 1))
    with pytest.raises(ValueError, match="reduces the gradients of th"):
        wrap(model, mesh, "fsdp")


@pytest.mark.verifies(WRAP)
def test_what_contradicts_the_mesh_is_refused(world):
    world(2).run(contradicted)


def too_early() -> None:
    model = wrapped_model(config_of(), Layout(data=2, zero=1))
    with pytest.raises(
        ValueError, match="zero1 shards in its optimizer: make that first"
    ):
        accumulate(model, *batch(0))
    model.optimizer(torch.optim.AdamW)
    with pytest.raises(ValueError, match="the model has its optimizer already"):
        model.optimizer(torch.optim.AdamW)
    accumulate(model, *batch(0))


@pytest.mark.verifies("xtrain.train.wrap:WrappedModel")
def test_zero_needs_its_one_optimizer_before_the_first_step(world):
    world(2).run(too_early)


def refused(layout: Layout, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_mesh(layout)


@pytest.mark.verifies("xtrain.train.layouts:check_layout")
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(data=3), "data 3 .* = 3 ranks, but there are 2"),
        (Layout(data=2, offload=True), "offload=True can only be planned"),
        (Layout(data=2, zero=1, replicate=2), "replicate=2 with zero=1"),
        (Layout(data=2, expert=4), "layout.expert=4 does not divide layout.data=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_a_layout_that_is_not_there_is_refused(world, layout, words):
    world(2).run(refused, layout, words)


def matrices(layout: Layout) -> list[list[int]]:
    model = wrapped_model(config_of(qkv_bias=True), layout)
    decayed, others = model.parameter_groups()
    assert others["weight_decay"] == 0.0 and "weight_decay" not in decayed
    names = {p: n for n, p in model.named_parameters()}
    assert all("proj.weight" in names[p] or "embed" in names[p] or "head" in names[p]
               for p in decayed["params"])  # fmt: skip
    return [len(decayed["params"]), len(others["params"])]


@pytest.mark.verifies("xtrain.train.wrap:WrappedModel")
def test_weight_decay_is_for_matrices_also_as_flat_shards(world):
    found = [world(2).run(matrices, Layout(data=2, zero=zero)) for zero in (0, 3)]
    assert found[0] == found[1] == [[16, 11]] * 2
