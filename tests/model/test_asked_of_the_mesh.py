"""Wrappers ask the model's mesh for what they are not told, and refuse the rest."""

import pytest
import torch
import torch.distributed as dist

from tests.model.mesh_training import WRAPPERS, batch, one_process, wrapped
from tests.model.twins import MIXTRAL, config_of
from xtrain.comm import init_mesh
from xtrain.comm.mesh import axes_of_ranks, mesh_of
from xtrain.comm.wrapper_mesh import alone, ranks_to_reduce
from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.model import XtrainModel
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import gpipe

MESH = (
    "xtrain.comm.mesh:set_mesh",
    "xtrain.comm.mesh:mesh_of",
    "xtrain.comm.wrapper_mesh:ranks_to_reduce",
    "xtrain.model.gradient_sums:check_skips",
)
STEPS = 3


def told_nothing(shape, axes, changes, expected) -> None:
    """Neither group, nor reduction, nor `skip`, is given."""
    mesh = init_mesh(shape, axes)
    for kind in WRAPPERS:
        bare = XtrainModel(config_of(**changes), mesh, dtype=torch.float64)
        model, optimizer = wrapped(bare, kind)
        for step in range(STEPS):
            rank, size = (
                (0, 1) if bare.data is None else (bare.data.rank(), bare.data.size())
            )
            model(*(t.chunk(size)[rank] for t in batch(step))).backward()
            bare.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
        found = dict(bare.named_parameters())
        if kind == "fsdp":
            found = model.full_state_dict()
        for name, place in ((n, bare.placement(n)) for n, _ in bare.named_parameters()):
            error = (found[name] - place.of(expected[name])).abs().max()
            assert error < 1e-10, (kind, axes, name, error)


@pytest.mark.verifies(*MESH)
def test_a_wrapper_takes_its_ranks_and_the_sum_from_the_mesh(world):
    for changes, meshes in (
        ({}, [((2, 2), ("data", "tensor")), ((2, 2), ("data", "context"))]),
        ({}, [((2,), ("tensor",)), ((3,), ("context",))]),
        (MIXTRAL, [((2,), ("expert",)), ((2, 2), ("expert_data", "expert"))]),
    ):
        expected, *_ = one_process(changes, STEPS)
        for shape, axes in meshes:
            size = torch.Size(shape).numel()
            world(size).run(told_nothing, shape, axes, changes, expected)


def refused() -> None:
    mesh = init_mesh((2, 2), ("data", "tensor"))
    model = XtrainModel(config_of(), mesh)
    tensor, data = (mesh[axis].get_group() for axis in ("tensor", "data"))
    assert mesh_of(model) is mesh and mesh_of(model.parameters()) is mesh
    assert mesh_of(torch.nn.Sequential(model)) is mesh
    assert mesh_of(torch.nn.Linear(2, 2)) is None
    assert axes_of_ranks(mesh, [0, 1, 2]) is None
    assert ranks_to_reduce(model, None, None)[1:] == ("sum", ("data",), None)
    for kind in WRAPPERS[1:]:
        for group, over in ((dist.group.WORLD, "data, tensor"), (tensor, "tensor")):
            with pytest.raises(ValueError, match=f"^process_group over {over} of"):
                wrapped(model, kind, process_group=group)
        with pytest.raises(ValueError, match="='average' of a model on a mesh"):
            wrapped(model, kind, gradient_reduction="average")
        first = 0 in dist.get_process_group_ranks(data)
        wrong = tensor if data.rank() == 0 and first else None  # rank 0 alone is wrong
        if first:
            with pytest.raises(ValueError, match="rank 0: process_group over tensor"):
                wrapped(model, kind, process_group=wrong)
    with pytest.raises(ValueError, match="'average' of a model on a mesh"):
        NaiveDataParallel(model, gradient_reduction="average")
    of_experts = init_mesh((2, 2), ("expert_data", "expert"))
    expert = of_experts["expert"].get_group()
    with pytest.raises(ValueError, match="^process_group over expert of .* expert_dat"):
        wrapped(
            XtrainModel(config_of(**MIXTRAL), of_experts), "ddp", process_group=expert
        )
    other = XtrainModel(config_of(), init_mesh((4,), ("data",)))
    both = torch.nn.ModuleList([model, other])
    with pytest.raises(ValueError, match="parameters of 2 meshes"):
        DistributedDataParallel(both)
    kept = DistributedDataParallel(model)  # its hooks end with it
    kept.module.loss(*batch(0)).backward()
    for skip in ((), ("context",)):
        with pytest.raises(ValueError, match="DistributedDataParallel sums over 'dat"):
            model.sync_gradients(skip=skip)
    beside = XtrainModel(config_of(), init_mesh((2, 2), ("data", "context")))
    over_data = DistributedDataParallel(beside)
    with pytest.raises(
        ValueError, match="DistributedDataParallel does not sum over 'c"
    ):
        over_data.module.sync_gradients(skip=("data", "context"))
    stages = XtrainModel.stages(config_of(), mesh, gpipe(1, 2))
    with pytest.raises(ValueError, match="no data_group, but .* ranks of data"):
        PipelineRunner(stages, gpipe(1, 2), stages[0].module.loss_fn, alone())


def over_context() -> None:
    """Shards over context ranks train; their norm is refused, and so is `skip`."""
    mesh = init_mesh((2,), ("context",))
    group = mesh["context"].get_group()
    for kind in WRAPPERS[2:]:
        bare = XtrainModel(config_of(), mesh)
        model, optimizer = wrapped(bare, kind, process_group=group)
        model(*batch(0)).backward()
        arguments = (1.0,) if kind == "fsdp" else (1.0, bare)
        owner = model if kind == "fsdp" else optimizer
        with pytest.raises(ValueError, match="shards over context ranks"):
            owner.clip_grad_norm_(*arguments)
        with pytest.raises(ValueError, match='it shards over "data"'):
            bare.sync_gradients(skip=("context",))


@pytest.mark.verifies(*MESH, "xtrain.comm.wrapper_mesh:wrong_group")
def test_what_contradicts_the_mesh_is_refused_on_every_rank(world):
    world(4).run(refused)


@pytest.mark.verifies(
    "xtrain.model.gradient_sums:check_skip", "xtrain.comm.wrapper_rules:check_counted"
)
def test_shards_over_context_ranks_alone_are_not_counted(world):
    world(2).run(over_context)
