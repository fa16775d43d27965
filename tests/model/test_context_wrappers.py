"""The decoder on context ranks under each wrapper over data, and its checkpoints."""

import pytest
import torch

from tests.model.mesh_training import WRAPPERS, Layout, MeshTraining, check_training
from tests.model.test_sharded_checkpoint import check_layouts
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel
from xtrain.testing import expect_error
from xtrain.zero import AdamW, ZeroOptimizer

MODEL = (
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.context:SequenceCut",
    "xtrain.model.gradient_sums:sum_gradients",
    "xtrain.model.loss:mean_cross_entropy",
)
WRAPPED = (
    "xtrain.data_parallel.ddp:DistributedDataParallel",
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.comm.wrapper_rules:pieces_of",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
KEYS = {"num_key_value_heads": 2}
LIMIT = 0.3  # below the norm of every step
ATTENTIONS = ("ring", "all_gather", "ulysses")


@pytest.mark.verifies(*MODEL, *WRAPPED, "xtrain.zero.clip:clip_sharded_grad_norm_")
def test_every_wrapper_over_data_trains_a_model_on_context_ranks(world):
    """Rows have unequal numbers of labels; the first micro-batch is in `no_sync`."""
    layouts = [
        Layout(wrapper, 2, 1, 2, ATTENTIONS[number % 3])
        for number, wrapper in enumerate(WRAPPERS)
    ]
    accumulated = [(layout, {"micro_batches": 2}) for layout in layouts]
    check_training(
        world, [*((layout, {}) for layout in layouts), *accumulated], KEYS, LIMIT
    )


@pytest.mark.verifies(*MODEL, *WRAPPED)
def test_one_data_rank_beside_context_ranks_trains_as_one_process(world):
    layouts = [Layout(wrapper, 1, 1, 3) for wrapper in WRAPPERS]
    check_training(world, [(layout, {}) for layout in layouts], KEYS, LIMIT)


@pytest.mark.verifies(*MODEL, *WRAPPED)
def test_data_context_and_tensor_ranks_train_as_one_process(world):
    layouts = [
        Layout("zero 2", 2, 2, 2, "ulysses"),
        Layout("fsdp", 2, 2, 2, "all_gather"),
    ]
    options = {"sequence_parallel": True, "micro_batches": 2}
    check_training(world, [(layout, options) for layout in layouts], KEYS, LIMIT)


# -- checkpoints

SAVED = {
    "plain": (Layout("plain", 1, 2, 2), [("zero 1", 2, 1, 2), ("fsdp", 2, 2)]),
    "zero 2": (Layout("zero 2", 2, 1, 2), [("plain", 1, 1, 3), ("ddp", 4, 1)]),
    "fsdp": (Layout("fsdp", 2, 1, 2), [("plain", 1, 2, 2), ("plain", 1, 1)]),
}


@pytest.mark.verifies(*MODEL, *WRAPPED, "xtrain.checkpoint.index:check_copies")
@pytest.mark.parametrize("wrapper", SAVED)
def test_saved_on_context_ranks_it_trains_on_without_them_and_back(
    world, tmp_path, wrapper
):
    saving, others = SAVED[wrapper]
    others = [Layout(*other) for other in others]
    check_layouts(world, KEYS, saving, others, str(tmp_path))


# -- what is refused


def over_the_wrong_axes(kind):
    """A wrapper that shards over context, or over data that `skip` leaves out."""
    mesh = init_mesh((2, 2), ("data", "context"))
    model = XtrainModel(MeshTraining(Layout("plain", 2, 1, 2), KEYS).bare.config, mesh)
    axis = "context" if kind == "over context" else "data"
    ZeroOptimizer(model.parameters(), AdamW, process_group=mesh[axis].get_group())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model.loss(tokens, tokens).backward()
    model.sync_gradients(skip=("context",) if kind == "over context" else ())


@pytest.mark.verifies("xtrain.model.gradient_sums:check_skip")
@pytest.mark.parametrize("kind", ["over context", "data not skipped"])
def test_shards_over_another_axis_than_data_are_refused(world, kind):
    expect_error(
        world(4),
        over_the_wrong_axes,
        kind,
        error=ValueError,
        match='ZeroOptimizer: it shards over "data"',
    )
