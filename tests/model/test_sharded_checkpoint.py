"""Checkpoints of a cut model: saved in one layout, trained on in any other."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from tests.model.mesh_training import Layout, MeshTraining, one_process
from tests.model.twins import config_of
from xtrain.checkpoint import CheckpointError, CheckpointReader, latest
from xtrain.model import XtrainModel

PARTS = (
    "xtrain.checkpoint.parameter_slice:Placement",
    "xtrain.checkpoint.pieces:Shard",
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.parameters:placement_of",
)
WRAPPED = (
    *PARTS,
    "xtrain.checkpoint.parameter_slice:placement_in",
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
KEYS = {"num_key_value_heads": 2}  # on 4 tensor ranks each is on two
ONE_KEY_TIED = {"num_key_value_heads": 1, "tie_word_embeddings": True}


def train_and_save(layout, changes, directory):
    """Two steps, a checkpoint, two more."""
    run = MeshTraining(layout, changes)
    run.train(0, 2)
    run.save(directory, 2, extra={"epoch": 1})
    run.train(2, 4)
    return run.weights()


def load_and_train(layouts, changes, directory, expected):
    """From other weights, what is saved and two more steps, in each layout."""
    found = []
    for layout in layouts:
        run = MeshTraining(layout, changes | {"seed": 7}, lr=0.5)
        assert run.load(directory) == (2, {"epoch": 1})
        run.train(2, 4)
        error = run.largest_error(expected)
        assert error < 1e-12, f"{layout}: {error}"
        found.append(run.weights())
    return found


def check_layouts(world, changes, saving, loading, directory):
    expected, *_ = one_process(changes, 4)
    size = saving.size
    uninterrupted = world(size).run(train_and_save, saving, changes, directory)
    by_size = {}
    for layout in (saving, *loading):
        by_size.setdefault(layout.size, []).append(layout)
    for ranks, layouts in by_size.items():
        found = world(ranks).run(load_and_train, layouts, changes, directory, expected)
        if ranks == size:  # the first is the layout that has saved
            for before, (after, *_) in zip(uninterrupted, found, strict=True):
                for name, weight in before.items():
                    assert torch.equal(after[name], weight), f"{saving} {name}"


@pytest.mark.verifies(*PARTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_saved_on_some_tensor_ranks_it_trains_on_on_any_number(world, tmp_path, size):
    others = [Layout("plain", 1, other) for other in (1, 2, 3, 4) if other != size]
    saving = Layout("plain", 1, size)
    check_layouts(world, ONE_KEY_TIED, saving, others, str(tmp_path))


SAVED = {
    "ddp": [("zero 1", 4, 1), ("fsdp", 1, 4), ("plain", 1, 2)],
    "zero 1": [("plain", 1, 4), ("zero 2", 1, 2), ("fsdp", 2, 1)],
    "zero 2": [("fsdp", 2, 2), ("zero 1", 1, 4), ("plain", 1, 1)],
    "fsdp": [("zero 2", 2, 2), ("ddp", 2, 2), ("plain", 1, 4), ("zero 1", 2, 1)],
    "plain": [("fsdp", 4, 1), ("zero 1", 2, 2), ("fsdp", 1, 2)],
}


@pytest.mark.verifies(*WRAPPED)
@pytest.mark.parametrize("wrapper", SAVED)
def test_saved_under_one_wrapper_on_a_mesh_it_trains_on_under_another(
    world, tmp_path, wrapper
):
    others = [Layout(*other) for other in SAVED[wrapper]]
    check_layouts(world, KEYS, Layout(wrapper, 2, 2), others, str(tmp_path))


# -- what a checkpoint of a cut model has, and what it refuses


def save_and_look(directory, changes):
    """Of every tensor, the offsets and sizes of its pieces; saved under FSDP, too."""
    found = []
    size = dist.get_world_size()
    for layout in (Layout("plain", 1, size), Layout("fsdp", size // 2, 2)):
        run = MeshTraining(layout, changes)
        run.train(0, 1)
        path = run.save(f"{directory}/{layout.wrapper}", 1)
        with CheckpointReader(path) as reader:
            boxes = {n: [s.boxes[0] for s in reader.stored(n)] for n in reader.tensors}
            found.append({n: boxes[n] for n in boxes if ":random:" not in n})
    return found


@pytest.mark.verifies("xtrain.checkpoint.parameter_slice:Placement", *PARTS[2:])
def test_what_several_tensor_ranks_hold_is_written_once(world, tmp_path):
    """Key heads, norms, tied heads and all of their moments; slices are one box."""
    (plain, sharded), *_ = world(4).run(save_and_look, str(tmp_path), ONE_KEY_TIED)
    full, *_ = one_process(ONE_KEY_TIED, 0)
    kinds = ["", ":cut:exp_avg:", ":cut:exp_avg_sq:"]
    weights = {f"{kind}{name}" for kind in kinds for name in full}
    for boxes in (plain, sharded):
        numbers = {f":number:step:{name}" for name in full}
        assert boxes.keys() == weights | numbers
        for name in weights:
            numel = full[name.split(":")[-1]].numel()
            assert sum(box.numel for box in boxes[name]) == numel, name
    assert "lm_head.weight" not in plain
    for name in weights:
        whole = "norm" in name or "k_proj" in name or "v_proj" in name
        assert len(plain[name]) == (1 if whole else 4), name
    down = sharded["layers.0.mlp.down_proj.weight"]
    assert {box.offset[1] for box in down} >= {0, 6}  # no range of the full tensor
    assert max(map(len, sharded.values())) > 4  # and some begin within a row


def without_optimizer(directory):
    """Weights alone are saved and loaded; the optimizer stays as it was."""
    size = dist.get_world_size()
    expected, *_ = one_process(KEYS, 2)
    for layout in (Layout("plain", 1, size), Layout("fsdp", 2, size // 2)):
        path = f"{directory}/{layout.wrapper}"
        run = MeshTraining(layout, KEYS)
        run.train(0, 2)
        run.save(path, 2, with_optimizer=False)
        for other in (Layout("plain", 2, size // 2), Layout("fsdp", size, 1)):
            again = MeshTraining(other, KEYS | {"seed": 3})
            again.load(path, with_optimizer=False)
            assert again.largest_error(expected) < 1e-12, (layout, other)
            assert not again.optimizer.state
        with pytest.raises(CheckpointError, match="has no optimizer state"):
            again.load(path)


@pytest.mark.verifies(*PARTS)
def test_weights_alone_load_on_any_mesh(world, tmp_path):
    world(4).run(without_optimizer, str(tmp_path))


def frozen_parameters(directory):
    """A frozen column slice, a frozen norm; ZeRO has both whole, FSDP in shards."""
    weights = []
    for wrapper, data in (("zero 1", 2), ("fsdp", 1), ("zero 2", 4)):
        layout = Layout(wrapper, data, dist.get_world_size() // data)
        run = MeshTraining(layout, KEYS, frozen=("down_proj", "input_layernorm"))
        if weights:
            assert run.load(directory)[0] == len(weights)
        run.train(len(weights), len(weights) + 1)
        weights.append(run.weights())
        run.save(directory, len(weights))
    expected, *_ = one_process(KEYS, 3, frozen=("down_proj", "input_layernorm"))
    assert run.largest_error(expected) < 1e-12


@pytest.mark.verifies("xtrain.zero.optimizer_checkpoint:whole_of", *WRAPPED)
def test_frozen_slices_are_saved_and_loaded(world, tmp_path):
    world(4).run(frozen_parameters, str(tmp_path))


def a_bare_file(path):
    """Each rank reads the range of its slice's columns that its shard is."""
    expected, *_ = one_process(KEYS, 2)
    if dist.get_rank() == 0:
        save_file(expected, path)
    dist.barrier()
    run = MeshTraining(Layout("fsdp", 2, 2), KEYS | {"seed": 3})
    run.model.load_full(path)
    assert run.largest_error(expected) == 0
    twin = MeshTraining(Layout("fsdp", 2, 2), KEYS | {"num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=r"layers.1.* in the checkpoint, not"):
        twin.model.load_full(path)


@pytest.mark.verifies("xtrain.zero.fsdp_checkpoint:load_full_units", *PARTS[:2])
def test_a_bare_models_file_is_read_into_shards_of_slices(world, tmp_path):
    world(4).run(a_bare_file, str(tmp_path / "model.safetensors"))


MISFITS = {
    "missing": (
        {"num_hidden_layers": 3},
        r"layers\.2\.mlp\.down_proj\.weight: not in the checkpoint, \[7, 12\] here",
    ),
    "extra": (
        {"num_hidden_layers": 1},
        r"layers\.1\.self_attn\.k_proj\.weight: \[8, 7\] in the checkpoint, not here",
    ),
    "tied": (
        {"tie_word_embeddings": True},
        r"lm_head\.weight: \[24, 7\] in the checkpoint, not here",
    ),
    "shape": (
        {"num_key_value_heads": 4},
        r"k_proj\.weight: \[8, 7\] in the checkpoint, \[16, 7\] here",
    ),
}


def misfits(directory):
    """A refused checkpoint has changed nothing, and all ranks say the full shapes."""
    said = []
    MeshTraining(Layout("ddp", 2, 2), KEYS).save(directory, 0)
    for what, (changes, match) in MISFITS.items():
        for wrapper in ("plain", "zero 2", "fsdp"):
            run = MeshTraining(Layout(wrapper, 2, 2), KEYS | changes)
            before = run.weights()
            with pytest.raises(CheckpointError, match=match) as caught:
                run.load(directory)
            for name, weight in run.weights().items():
                assert torch.equal(weight, before[name]), f"{what} {wrapper} {name}"
            said.append(str(caught.value))
    return said


@pytest.mark.verifies("xtrain.checkpoint.index:compare", *WRAPPED)
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(world, tmp_path):
    first, *others = world(4).run(misfits, str(tmp_path))
    assert len(first) == 3 * len(MISFITS)
    assert all(other == first for other in others)


def replicas_that_differ(directory):
    """Rank 1 has another norm than rank 0, and half of the ranks another key head."""
    layout, said = Layout("plain", 1, 4), []
    for name in ("norm.weight", "layers.1.self_attn.k_proj.weight"):
        run = MeshTraining(layout, KEYS)
        with torch.no_grad():
            run.bare.get_parameter(name).add_(dist.get_rank() % 2)
        with pytest.raises(CheckpointError) as caught:
            run.save(directory, 0)
        said.append(str(caught.value))
    return said


@pytest.mark.verifies("xtrain.checkpoint.index:check_copies", PARTS[0], PARTS[2])
def test_replicas_that_have_drifted_apart_are_not_saved(world, tmp_path):
    for norm, key in world(4).run(replicas_that_differ, str(tmp_path)):
        assert "norm.weight: ranks 0 and 1 hold different values" in norm
        assert "k_proj.weight: ranks 0 and 1 hold different values" in key
    assert latest(tmp_path) is None


def two_axes_of_half_the_world():
    """A mesh of several axes has no group of its own unless it is that of all."""
    ranks = torch.arange(4, device="cpu").view(2, 2)
    meshes = [DeviceMesh("cpu", ranks + n) for n in (0, 4)]
    for part in meshes:
        part_names = DeviceMesh("cpu", part.mesh, mesh_dim_names=("data", "tensor"))
        if dist.get_rank() in part.mesh.flatten().tolist():
            model = XtrainModel(config_of(**KEYS), part_names)
    with pytest.raises(ValueError, match="a mesh of 4 ranks in a world of 8"):
        model.all_ranks()


@pytest.mark.verifies("xtrain.model.mesh_axes:mesh_group")
def test_a_mesh_without_a_group_of_its_own_is_refused(world):
    world(8).run(two_axes_of_half_the_world)
