"""The decoder with experts on meshes of expert ranks, against the whole one."""

import pytest

from tests.model.expert_cases import Case, train_all

MODEL = "xtrain.model.decoder:XtrainModel"
MOE = "xtrain.model.moe:make_moe"
CUT = "xtrain.model.moe:TensorMoE"
PLACES = ("xtrain.model.parameters:placement_of", "xtrain.model.mesh_axes:batch_group")
LOSSES = "xtrain.model.balance:auxiliary_loss"
BIASES = "xtrain.model.balance:update_biases"
TIED = (("num_key_value_heads", 2), ("tie_word_embeddings", True))
POOLED = (("router_aux_loss_pooled", True),)
TWO_KEYS = (("num_key_value_heads", 2),)

ALONE = {
    1: [Case(1, 1, losses=True), Case(1, 1, kind="deepseek")],
    2: [
        Case(1, 2, losses=True, changes=POOLED),
        Case(1, 2, kind="deepseek", padded=True),
        Case(2, 1),
    ],
    4: [
        Case(1, 4, changes=TIED),
        Case(2, 2, losses=True, padded=True),
        Case(2, 2, kind="deepseek"),
    ],
    8: [Case(1, 8), Case(2, 4, kind="deepseek", losses=True)],
}


@pytest.mark.verifies(MODEL, MOE, *PLACES, LOSSES, BIASES)
@pytest.mark.parametrize("size", ALONE)
def test_on_expert_ranks_it_trains_as_one_device(world, size):
    """Loss, every gradient, three clipped steps, and biases moved by all loads."""
    world(size).run(train_all, ALONE[size])


BESIDE = [
    Case(1, 2, tensor=2, losses=True, changes=TWO_KEYS),
    Case(1, 2, tensor=2, sequence_parallel=True, kind="deepseek"),
    Case(
        1,
        1,
        tensor=4,
        sequence_parallel=True,
        losses=True,
        kind="deepseek",
        padded=True,
    ),
    Case(1, 2, context=2, losses=True, padded=True),
    Case(1, 1, context=2, tensor=2, kind="deepseek"),
]


@pytest.mark.verifies(MODEL, MOE, CUT, *PLACES, LOSSES, BIASES)
def test_with_tensor_and_context_ranks_besides_it_trains_as_one_device(world):
    world(4).run(train_all, BESIDE)


@pytest.mark.verifies(MODEL, CUT)
def test_on_all_axes_at_once_it_trains_as_one_device(world):
    world(8).run(
        train_all,
        [
            Case(1, 2, context=2, tensor=2, sequence_parallel=True, losses=True),
            Case(2, 2, tensor=2, kind="deepseek"),
        ],
    )
