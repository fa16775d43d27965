"""Checkpoints of stages: saved in one layout, trained on in any other."""

import pytest
import torch

from tests.model.stage_training import Layout, StageTraining, one_process, train_whole
from tests.model.twins import config_of
from xtrain.checkpoint import (
    CheckpointError,
    CheckpointReader,
    load_checkpoint,
    save_checkpoint,
)
from xtrain.model import XtrainModel

PARTS = (
    "xtrain.model.decoder_parts:DecoderParts",
    "xtrain.model.decoder_weights:DecoderWeights",
    "xtrain.model.stages:make_modules",
    "xtrain.checkpoint.pieces:Shard",
)
CHANGES = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
MESHES = {
    "pipeline and tensor": (
        Layout("interleaved", 2, 1, 2),
        [Layout("one_f_one_b", 4), Layout("dualpipe", 2), Layout("zb_v", 2, 2)],
    ),
    "mirrored": (
        Layout("chimera", 2, 2),
        [Layout("zb_v", 2, 1, 2), Layout("gpipe", 3), Layout("dualpipe", 4)],
    ),
    "both ends on one rank": (Layout("zb_v", 3), [Layout("gpipe", 2, 1, 2)]),
}


def save(layout, directory):
    """Two steps, a checkpoint; which boxes of every tensor are in it."""
    run = StageTraining(layout, CHANGES)
    run.train(0, 2)
    path = save_checkpoint(directory, 2, run.shards(), run.optimizer, {"epoch": 1})
    with CheckpointReader(path) as reader:
        return {n: [s.boxes[0].numel for s in reader.stored(n)] for n in reader.tensors}


def load(layouts, directory, expected):
    """From other weights and another rate: what is saved, and two more steps."""
    for layout in layouts:
        run = StageTraining(layout, CHANGES | {"seed": 7}, lr=0.5)
        found = load_checkpoint(directory, run.shards(), run.optimizer)
        assert found == (2, {"epoch": 1})
        run.train(2, 4)
        run.check(expected, layout)


def load_whole(directory, expected):
    """Into one process without stages."""
    model = XtrainModel(config_of(**CHANGES, seed=7), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load_checkpoint(directory, model.shards(), optimizer)
    train_whole(model, optimizer, 2, 4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.verifies(*PARTS)
@pytest.mark.parametrize("case", MESHES)
def test_saved_in_stages_it_trains_on_in_any_other_layout(world, tmp_path, case):
    saving, loading = MESHES[case]
    whole, _ = one_process(CHANGES, 4)
    expected = {name: p.detach() for name, p in whole.named_parameters()}
    boxes, *_ = world(saving.size).run(save, saving, str(tmp_path))
    for kind in ("", ":cut:exp_avg:", ":cut:exp_avg_sq:"):
        for name, parameter in expected.items():  # replicas and both ends: once
            assert sum(boxes[kind + name]) == parameter.numel(), name
    assert "lm_head.weight" not in boxes
    by_size = {}
    for layout in (saving, *loading):
        by_size.setdefault(layout.size, []).append(layout)
    for size, layouts in by_size.items():
        world(size).run(load, layouts, str(tmp_path), expected)
    world(1).run(load_whole, str(tmp_path), expected)


def save_whole(directory):
    model = XtrainModel(config_of(**CHANGES), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    train_whole(model, optimizer, 0, 2)
    save_checkpoint(directory, 2, model.shards(), optimizer, {"epoch": 1})


@pytest.mark.verifies(*PARTS)
def test_saved_by_one_process_it_trains_on_in_stages(world, tmp_path):
    whole, _ = one_process(CHANGES, 4)
    expected = {name: p.detach() for name, p in whole.named_parameters()}
    world(1).run(save_whole, str(tmp_path))
    layouts = [Layout("zb_v", 2), Layout("dualpipe", 2)]
    world(2).run(load, layouts, str(tmp_path), expected)


def another_model(directory):
    run = StageTraining(Layout("gpipe", 2), CHANGES | {"num_hidden_layers": 5})
    before = [p.detach().clone() for _, _, p in run.named_parameters()]
    with pytest.raises(CheckpointError, match=r"layers\.4\.\S+: not in the checkpoint"):
        load_checkpoint(directory, run.shards(), run.optimizer)
    after = [p for _, _, p in run.named_parameters()]
    assert all(map(torch.equal, before, after))


@pytest.mark.verifies(*PARTS)
def test_stages_of_another_model_are_refused_on_every_rank(world, tmp_path):
    """Also on the rank whose own layers are all there."""
    world(1).run(save_whole, str(tmp_path))
    world(2).run(another_model, str(tmp_path))


def mirrors_that_differ(directory):
    run = StageTraining(Layout("dualpipe", 2), CHANGES)
    with torch.no_grad():
        for module in run.modules:
            if module.is_copy:
                next(iter(module.layers)).mlp.up_proj.weight.add_(1)
    with pytest.raises(CheckpointError, match="ranks 0 and 1 hold different values"):
        save_checkpoint(directory, 0, run.shards())


@pytest.mark.verifies(PARTS[0], "xtrain.checkpoint.index:check_copies")
def test_mirrored_stages_that_have_drifted_apart_are_not_saved(world, tmp_path):
    world(2).run(mirrors_that_differ, str(tmp_path))
