"""Experts under DDP, ZeRO and FSDP, clipped, and in checkpoints of any layout."""

import pytest
import torch

from tests.model.mesh_training import (
    WRAPPERS,
    Layout,
    MeshTraining,
    check_training,
    one_process,
)
from tests.model.test_sharded_checkpoint import load_and_train, train_and_save
from tests.model.twins import DEEPSEEK, MIXTRAL, batch, config_of
from xtrain.checkpoint import CheckpointReader
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel
from xtrain.zero import ZeroOptimizer

MODEL = "xtrain.model.decoder:XtrainModel"
SPAN = "xtrain.model.decoder_parts:DecoderParts"
PLACES = (
    "xtrain.model.parameters:placement_of",
    "xtrain.checkpoint.parameter_slice:Placement",
)
SUMS = "xtrain.model.gradient_sums:check_skip"
BIASES = "xtrain.model.balance:update_biases"
LIMIT = 0.3  # below the norm of every step
# AdamW divides small gradients, those of experts with few tokens, by themselves.
ROUNDING = {"tolerance": 1e-10, "digits": 1e-12}


@pytest.mark.verifies(MODEL, SPAN, *PLACES, BIASES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_wrapper_over_expert_data_trains_experts_as_one_device(world, micro_batches):
    """Norms, too: each shard of an expert counts once, under each wrapper."""
    changes = (MIXTRAL, DEEPSEEK)[micro_batches - 1]
    options = {"micro_batches": micro_batches}
    runs = [(Layout(wrapper, 2, 1, expert=2), options) for wrapper in WRAPPERS]
    check_training(world, runs, changes, LIMIT, **ROUNDING)


@pytest.mark.verifies(MODEL, SPAN, *PLACES)
def test_with_tensor_ranks_besides_it_trains_experts_as_one_device(world):
    runs = [(Layout(wrapper, 2, 2, expert=2), {}) for wrapper in ("fsdp", "zero 2")]
    check_training(world, runs, MIXTRAL, LIMIT, **ROUNDING)


SAVED = {
    "plain": (
        Layout("plain", 1, 2, expert=2),
        [
            Layout("plain", 1, 1, expert=4),
            Layout("fsdp", 2, 1, expert=2),
            Layout("plain", 1, 1, expert=0),
            Layout("plain", 2, 1),
        ],
    ),
    "zero 2": (
        Layout("zero 2", 2, 1, expert=2),
        [Layout("plain", 1, 2, expert=2), Layout("zero 1", 2, 2)],
    ),
    "fsdp": (
        Layout("fsdp", 2, 1, expert=2),
        [Layout("plain", 1, 1, expert=2), Layout("zero 2", 1, 1, expert=4)],
    ),
}


@pytest.mark.verifies(MODEL, SPAN, *PLACES, "xtrain.checkpoint.pieces:Shard")
@pytest.mark.parametrize("wrapper", SAVED)
def test_saved_on_some_expert_ranks_it_trains_on_on_others(world, tmp_path, wrapper):
    """Weights, moments and biases of routers."""
    saving, others = SAVED[wrapper]
    expected, *_ = one_process(DEEPSEEK, 4)
    world(saving.size).run(train_and_save, saving, DEEPSEEK, str(tmp_path))
    by_size: dict[int, list[Layout]] = {}
    for layout in others:
        by_size.setdefault(layout.size, []).append(layout)
    for size, layouts in by_size.items():
        world(size).run(load_and_train, layouts, DEEPSEEK, str(tmp_path), expected)


def save_and_look(directory):
    """The pieces of stacked experts, of 2 expert and 2 tensor ranks."""
    run = MeshTraining(Layout("plain", 1, 2, expert=2), DEEPSEEK)
    run.train(0, 1)
    with CheckpointReader(run.save(directory, 1)) as reader:
        stored = {n: [s.boxes[0] for s in reader.stored(n)] for n in reader.tensors}
    return stored


@pytest.mark.verifies("xtrain.checkpoint.parameter_slice:Placement")
def test_an_experts_slice_is_one_box_and_a_router_is_written_once(world, tmp_path):
    stored = world(4).run(save_and_look, str(tmp_path))[0]
    gate = {tuple(box) for box in stored["layers.1.mlp.experts.gate_proj"]}
    down = {tuple(box) for box in stored["layers.1.mlp.experts.down_proj"]}
    assert gate == {((e, f, 0), (4, 2, 7)) for e in (0, 4) for f in (0, 2)}
    assert down == {((e, 0, f), (4, 7, 2)) for e in (0, 4) for f in (0, 2)}
    for name in ("router.weight", "router.balance_bias"):
        assert len(stored[f"layers.1.mlp.{name}"]) == 1
    assert "layers.0.mlp.router.weight" not in stored  # a dense layer


# -- what is refused, on every rank


def refused() -> None:
    config, names = config_of(**MIXTRAL), ("expert_data", "expert")
    dense = config_of()
    for axes, of, said in (
        (("data", "expert"), config, 'never together with "data"'),
        (("data", "expert_data"), config, 'never together with "data"'),
        (names, dense, "this model has no experts, num_local_experts=0"),
    ):
        with pytest.raises(ValueError, match=said):
            XtrainModel(of, init_mesh((2, 2), axes))
    with pytest.raises(ValueError, match="num_local_experts=6 on 4 expert ranks"):
        XtrainModel(
            config_of(**MIXTRAL | {"num_local_experts": 6}), init_mesh((4,), names[1:])
        )
    mesh = init_mesh((2, 2), ("expert", "tensor"))
    with pytest.raises(ValueError, match="moe_intermediate_size: 3 is not divisible"):
        XtrainModel(config_of(**MIXTRAL, moe_intermediate_size=3), mesh)

    mesh = init_mesh((2, 2), names)
    model = XtrainModel(config, mesh)
    model.loss(*batch(0)).backward()
    with pytest.raises(ValueError, match='no wrapper .* "expert"'):
        model.sync_gradients(skip=names)
    with pytest.raises(ValueError, match="no biases to update"):
        model.update_balance_biases()
    ZeroOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        stage=1,
        process_group=mesh["expert_data"].get_group(),
        lr=0.1,
        gradient_reduction="sum",
    )
    with pytest.raises(ValueError, match='it shards over "expert_data", '):
        model.sync_gradients(skip=())


@pytest.mark.verifies(MODEL, SUMS, "xtrain.model.mesh_axes:check_expert_axes")
def test_what_does_not_fit_experts_is_refused_on_every_rank(world):
    world(4).run(refused)
