"""The decoder cut into stages: what each rank holds, and that together they train."""

import math

import pytest

from tests.model.stage_training import Layout, StageTraining, one_process
from tests.model.test_on_a_mesh import close

STAGES = (
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.span:DecoderSpan",
    "xtrain.model.stages:DecoderStage",
    "xtrain.model.stages:make_stages",
)
CLIP = "xtrain.model.stages:clip_stages_grad_norm_"
LIMIT = 0.3  # below the norm of every step
DEEP = {"num_hidden_layers": 6, "num_key_value_heads": 2}
TIED = DEEP | {"tie_word_embeddings": True}


def trained(layouts, changes, whole, expected, sequence_parallel):
    """Three clipped steps in each layout, against those of one process."""
    for layout in layouts:
        run = StageTraining(layout, changes, sequence_parallel=sequence_parallel)
        for (loss, norm), right in zip(run.train(0, 3, LIMIT), expected, strict=True):
            assert math.isclose(loss, right[0], rel_tol=1e-12), (layout, loss, right)
            assert math.isclose(norm, right[1], rel_tol=1e-12), (layout, norm, right)
        for module, name, parameter in run.named_parameters():
            full = whole[name]
            close(parameter, module.placement(name).of(full), f"{layout} {name}")


def check_layouts(world, layouts, changes, sequence_parallel=False):
    whole, expected = one_process(changes, 3, max_norm=LIMIT)
    assert min(norm for _, norm in expected) > 2 * LIMIT
    weights = {name: p.detach() for name, p in whole.named_parameters()}
    world(layouts[0].size).run(
        trained, layouts, changes, weights, expected, sequence_parallel
    )


ON_RANKS = {
    1: [Layout("gpipe", 1), Layout("interleaved", 1)],
    2: [Layout("gpipe", 2), Layout("zb_v", 2), Layout("dualpipe", 2)],
    3: [Layout("interleaved", 3), Layout("dualpipe_v", 3)],
    4: [Layout("one_f_one_b", 4), Layout("zb_v", 4), Layout("chimera", 4)],
}


@pytest.mark.verifies(*STAGES, CLIP)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_stages_train_as_the_whole_model(world, size):
    for changes in (DEEP, TIED):
        check_layouts(world, ON_RANKS[size], changes)


@pytest.mark.verifies(*STAGES, CLIP)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stages_on_tensor_and_data_ranks_train_as_the_whole_model(
    world, sequence_parallel
):
    layouts = [
        Layout("interleaved", 2, 1, 2),
        Layout("dualpipe", 2, 2, 1),
        Layout("zb_v", 2, 2, 1),
        Layout("chimera", 2, 1, 2),
    ]
    check_layouts(world, layouts, TIED, sequence_parallel)
