"""Hybrid sharding of a cut model: part of the "data" axis is one copy."""

import pytest
import torch
import torch.distributed as dist

from tests.model.mesh_training import Layout, MeshTraining, one_process
from tests.model.stage_training import Layout as StageLayout
from tests.model.stage_training import StageTraining
from tests.model.stage_training import one_process as stages_in_one_process
from tests.model.twins import LIMIT, MIXTRAL, config_of
from xtrain.comm import init_mesh
from xtrain.comm.wrapper_rules import summed_over
from xtrain.model import XtrainModel, batch_group
from xtrain.model.layer import DecoderLayer
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.testing import World, expect_error
from xtrain.zero import FullyShardedDataParallel
from xtrain.zero.hybrid import hybrid_groups

GROUPS = "xtrain.zero.hybrid:hybrid_groups"
GRID = "xtrain.zero.hybrid:grid_of"
FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"
KEYS = {"num_key_value_heads": 2}
MAX_NORM = 0.05  # below the norm of every step


def hybrid(module, inner, mesh):
    shards, replicas = hybrid_groups(inner, mesh=mesh)
    return FullyShardedDataParallel(
        module, shards, blocks=[DecoderLayer], replicate_group=replicas
    )


class HybridTraining(MeshTraining):
    """`MeshTraining` with copies of the model on every `inner` data ranks."""

    def __init__(self, layout, inner, changes, **options):
        super().__init__(layout._replace(wrapper="plain"), changes, **options)
        self.layout = layout
        self.model = hybrid(self.bare, inner, self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.03)


def train(layout, inner, changes, expected, norms, options):
    run = HybridTraining(layout, inner, changes, max_norm=MAX_NORM, **options)
    over = {axis for p in run.bare.parameters() for axis in summed_over(p)}
    assert over == {layout.axis}
    run.train(0, 2)
    error = run.largest_error(expected)
    assert error < 1e-12, error
    assert run.norms == pytest.approx(norms, rel=1e-13, abs=0)
    return run.norms


LAYOUTS = {
    "data x tensor": (Layout("fsdp", 4, 2), KEYS, {"sequence_parallel": True}),
    "accumulated": (Layout("fsdp", 4, 2), KEYS, {"micro_batches": 2}),
    "data x context": (Layout("fsdp", 4, 1, 2), KEYS, {}),
    "experts": (Layout("fsdp", 4, 1, expert=2), MIXTRAL, {}),
}


@pytest.mark.verifies(GROUPS, GRID, FSDP)
@pytest.mark.parametrize("inner", [2, 4])
@pytest.mark.parametrize("what", LAYOUTS)
def test_copies_on_a_mesh_train_as_one_process(what, inner):
    """Norms count each slice and each shard once, and of copies the first."""
    layout, changes, options = LAYOUTS[what]
    expected, norms, _ = one_process(changes, 2, MAX_NORM)
    assert min(norms) > 2 * MAX_NORM
    arguments = layout, inner, changes, expected, norms, options
    first, *others = World(8, "xtrain-virtual").run(train, *arguments)
    assert all(other == first for other in others)


def two_copies_of_two(layout, expected, norms):
    train(layout, 1, KEYS, expected, norms, {})


@pytest.mark.verifies(GROUPS, GRID)
def test_copies_on_a_mesh_of_real_processes(world):
    expected, norms, _ = one_process(KEYS, 2, MAX_NORM)
    world(4).run(two_copies_of_two, Layout("fsdp", 2, 2), expected, norms)


class HybridStages(StageTraining):
    """Stages of a pipeline, each with copies on every `inner` data ranks."""

    def __init__(self, layout, inner, changes):
        super().__init__(layout, changes)
        self.wrapper = "fsdp"
        for stage in self.stages:
            stage.module = hybrid(stage.module, inner, self.mesh)
        parameters = [p for stage in self.stages for p in stage.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.03)
        self.runner = PipelineRunner(
            self.stages,
            self.schedule,
            self.runner.loss_fn,
            self.mesh["pipeline"].get_group(),
            data_group=batch_group(self.mesh),
        )


def train_stages(layout, inner, changes, expected, state):
    run = HybridStages(layout, inner, changes)
    found = run.train(0, len(expected), LIMIT)
    for mine, right in zip(found, expected, strict=True):
        assert mine == pytest.approx(right, rel=1e-12, abs=0)
    run.check(state, layout)


@pytest.mark.verifies(
    GROUPS, GRID, FSDP, "xtrain.model.stage_gradients:clip_stages_grad_norm_"
)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v"])
def test_copies_of_stages_train_as_one_process(schedule):
    """Pipeline 2 x data 4; the norm of all stages counts the first copy alone."""
    changes = {"num_hidden_layers": 4}
    whole, expected = stages_in_one_process(changes, 2, LIMIT)
    state = {name: p.detach() for name, p in whole.named_parameters()}
    layout = StageLayout(schedule, 2, 4, micro_batches=2)
    arguments = layout, 2, changes, expected, state
    World(layout.size, "xtrain-virtual").run(train_stages, *arguments)


def save(layout, inner, directory):
    run = HybridTraining(layout, inner, KEYS)
    run.train(0, 1)
    run.save(directory, 1)


def load(layout, inner, directory, expected):
    """From other weights, with copies or without."""
    changes = KEYS | {"seed": 7}
    if inner is None:
        run = MeshTraining(layout, changes)
    else:
        run = HybridTraining(layout, inner, changes)
    run.load(directory)
    run.train(1, 3)
    assert run.largest_error(expected) < 1e-12


@pytest.mark.verifies(FSDP, "xtrain.zero.fsdp_checkpoint:save_units")
def test_a_checkpoint_of_copies_on_a_mesh_loads_into_any_other(tmp_path):
    expected, *_ = one_process(KEYS, 3)
    eight, four = World(8, "xtrain-virtual"), World(4, "xtrain-virtual")
    eight.run(save, Layout("fsdp", 4, 2), 2, str(tmp_path))
    eight.run(load, Layout("fsdp", 4, 2), 1, str(tmp_path), expected)
    four.run(load, Layout("fsdp", 2, 2), None, str(tmp_path), expected)
    four.run(load, Layout("fsdp", 4, 1), 2, str(tmp_path), expected)


def groups_of_meshes():
    """Of each data group by itself, whatever other axes stand beside it."""
    found = []
    for shape, axes, inner in (
        ((2, 4), ("pipeline", "data"), 2),
        ((4, 2), ("data", "tensor"), 2),
        ((4, 2), ("expert_data", "expert"), 2),
        ((1, 4, 2), ("data", "expert_data", "expert"), 2),
        ((2, 4), ("pipeline", "tensor"), 1),
    ):
        mesh = init_mesh(shape, axes)
        groups = hybrid_groups(inner, mesh=mesh)
        found.append([dist.get_process_group_ranks(group) for group in groups])
    return found


@pytest.mark.verifies(GROUPS)
def test_every_data_group_of_a_mesh_is_cut():
    found = World(8, "xtrain-virtual").run(groups_of_meshes)
    assert found[5] == [
        [[4, 5], [5, 7]],
        [[5, 7], [1, 5]],
        [[5, 7], [1, 5]],
        [[5, 7], [1, 5]],
        [[5], [5]],
    ]
    for of_mesh in zip(*found, strict=True):
        for inner, outer in of_mesh:
            assert len(set(inner) & set(outer)) == 1


def refused(case):
    mesh = init_mesh((2, 2), ("data", "tensor"))
    data, tensor = (mesh[axis].get_group() for axis in ("data", "tensor"))
    model = XtrainModel(config_of(**KEYS), mesh)
    if case == "over tensor ranks":
        FullyShardedDataParallel(model, data, replicate_group=tensor)
    elif case == "an average":
        inner, outer = hybrid_groups(1, mesh=mesh)
        FullyShardedDataParallel(
            model, inner, gradient_reduction="average", replicate_group=outer
        )
    elif case == "another size":
        hybrid_groups(1 + (dist.get_rank() == 3), mesh=mesh)
    elif case == "both":
        hybrid_groups(1, data, mesh=mesh)
    elif case == "no divisor":
        hybrid_groups(3, mesh=mesh)


REFUSED = {
    "over tensor ranks": "process_group over data, tensor of a mesh of data, tensor",
    "an average": "gradient_reduction='average' of a model on a mesh",
    "another size": "ranks 0 and 3 have different inner_size: inner_size is 1 and 2",
    "both": "a group or a mesh, not both",
    "no divisor": "inner_size=3 does not divide the 2 ranks",
}


@pytest.mark.verifies(GROUPS, GRID)
@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_on_a_mesh_are_errors_on_every_rank(case):
    expect_error(World(4, "xtrain-virtual"), refused, case, match=REFUSED[case])
