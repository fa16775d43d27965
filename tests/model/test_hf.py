"""Checkpoints in Hugging Face's layout: into shards, out of them, what is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from tests.model.test_on_a_mesh import batch, close, config_of
from xtrain.checkpoint import CheckpointError
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel, load_hf, save_hf
from xtrain.model.hf_config import config_from_hf, config_to_hf
from xtrain.zero import FullyShardedDataParallel

LOAD = "xtrain.model.hf:load_hf"
SAVE = "xtrain.model.hf:save_hf"
CONFIG = "xtrain.model.hf_config:config_from_hf"


def written(folder) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whatever its files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def round_trip(folder, sizes, axes, changes, dtype, most) -> None:
    """Save whole, load cut, save cut: the same files' tensors, bit for bit."""
    mesh = init_mesh(sizes, axes)
    rank = mesh.get_rank()
    whole = XtrainModel(config_of(**changes), dtype=dtype)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(torch.linspace(1, 2, parameter.numel()).view_as(parameter))
    mine = folder / f"whole-{rank}"
    save_hf(whole, mine, max_file_bytes=most)
    cut = load_hf(mine, mesh)
    assert cut.config == whole.config and cut.mesh is mesh
    for name, parameter in cut.named_parameters():
        expected = cut.placement(name).of(whole.get_parameter(name))
        assert parameter.dtype == dtype and torch.equal(parameter, expected), name
    save_hf(cut, folder / "cut", max_file_bytes=most)
    if rank == 0:
        before, after = written(mine), written(folder / "cut")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        names = {p.name for p in mine.iterdir()}
        assert names == {p.name for p in (folder / "cut").iterdir()}
        assert ("model.safetensors.index.json" in names) == (most < 10_000)
        assert ("lm_head.weight" in before) != whole.config.tie_word_embeddings
    again = load_hf(mine)
    tokens, labels = batch(1)
    close(again.double().loss(tokens, labels), whole.double().loss(tokens, labels))


@pytest.mark.verifies(LOAD, SAVE)
@pytest.mark.parametrize(
    ("sizes", "axes", "changes", "dtype", "most"),
    [
        ((1,), ("tensor",), {}, torch.float32, 10**9),
        ((2,), ("tensor",), {"tie_word_embeddings": True}, torch.bfloat16, 1500),
        ((3,), ("tensor",), {"num_key_value_heads": 1}, torch.float16, 10**9),
        ((4,), ("tensor",), {"num_key_value_heads": 2}, torch.float32, 3000),
        ((2, 2), ("data", "tensor"), {"rope_scaling": None}, torch.float64, 10**9),
    ],
)
def test_into_shards_and_back_every_bit_and_dtype_is_kept(
    world, tmp_path, sizes, axes, changes, dtype, most
):
    size = torch.Size(sizes).numel()
    world(size).run(round_trip, tmp_path, sizes, axes, changes, dtype, most)


def ranges_read(folder) -> None:
    """Each rank asks for its own slices: of whole matrices, a half of the elements."""
    import xtrain.model.hf as hf

    asked = []
    original = hf.read_box

    def watching(opened, name, box):
        asked.append(box.numel)
        return original(opened, name, box)

    hf.read_box = watching
    try:
        model = load_hf(folder, init_mesh((2,), ("tensor",)))
    finally:
        hf.read_box = original
    assert sum(asked) == sum(p.numel() for p in model.parameters())


@pytest.mark.verifies(LOAD)
def test_a_rank_reads_its_own_elements_only(world, tmp_path):
    save_hf(XtrainModel(config_of()), tmp_path)
    world(2).run(ranges_read, tmp_path)


def damaged(folder):
    """(what was done, what the error says); each from a copy of the checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def with_tensors(changed):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})

    with_tensors({k: v for k, v in tensors.items() if k != name})
    yield "missing", f"{name}: missing"
    with_tensors(tensors | {"model.extra": torch.ones(2)})
    yield "extra", "model.extra: left over"
    with_tensors(tensors | {name: tensors[name].t().contiguous()})
    yield "misshaped", rf"{name}: \[7, 12\] in the file, \[12, 7\] by config.json"
    with_tensors(tensors)
    values = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type llama3 without factor"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ):
        (folder / "config.json").write_text(json.dumps(values | change))
        yield str(change), said
    (folder / "config.json").write_text(json.dumps(values | {"rope_scaling": [1]}))
    yield "rope", "are no table"
    (folder / "config.json").write_text(json.dumps(values))
    with_tensors(tensors | {name: tensors[name].bfloat16()})
    yield "dtypes", "torch.bfloat16, torch.float32 in one checkpoint: pass dtype"
    with_tensors(tensors | {name: tensors[name].int()})
    yield "whole numbers", f"{name} is torch.int32, not floating"
    with_tensors(tensors)
    (folder / "config.json").write_text("{")
    yield "json", "config.json cannot be read"
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(b"\x10")
    yield "file", "model.safetensors cannot be read"
    (folder / "model.safetensors.index.json").write_text("{}")
    yield "index", "has no weight_map"
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: "../secret.safetensors"}})
    )
    yield "path", "is no file of the directory"


def refuses(folder, said) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_hf(folder, init_mesh((2,), ("tensor",)))


@pytest.mark.verifies(LOAD, CONFIG)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(world, tmp_path):
    save_hf(XtrainModel(config_of()), tmp_path)
    for _, said in damaged(tmp_path):
        with pytest.raises(CheckpointError, match=said):
            load_hf(tmp_path)
        world(2).run(refuses, tmp_path, said)


def missing_on_one(folder) -> None:
    mesh = init_mesh((2,), ("tensor",))
    here = folder if mesh.get_rank() == 0 else folder / "nowhere"
    with pytest.raises(CheckpointError, match="rank 1: .*config.json cannot be read"):
        load_hf(here, mesh)


@pytest.mark.verifies(LOAD)
def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(world, tmp_path):
    save_hf(XtrainModel(config_of()), tmp_path)
    world(2).run(missing_on_one, tmp_path)


def dtypes_made_one(folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_hf(folder, init_mesh((1,), ("tensor",)), dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.verifies(LOAD)
def test_a_dtype_that_is_given_holds_for_all_tensors(world, tmp_path):
    save_hf(XtrainModel(config_of()), tmp_path)
    world(1).run(dtypes_made_one, tmp_path)


def not_its_own_shapes(folder) -> None:
    mesh = init_mesh((2,), ("data",))
    model = XtrainModel(config_of(), mesh)
    FullyShardedDataParallel(model, process_group=mesh["data"].get_group())
    with pytest.raises(ValueError, match="a wrapper has sharded it"):
        save_hf(model, folder)


@pytest.mark.verifies(SAVE)
def test_what_a_wrapper_has_sharded_is_not_saved(world, tmp_path):
    world(2).run(not_its_own_shapes, tmp_path)
    assert list(tmp_path.iterdir()) == []


def half_a_world(folder) -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tensor",))
    if mesh.get_coordinate() is not None:
        with pytest.raises(ValueError, match="a mesh of 2 ranks in a world of 3"):
            load_hf(folder, mesh)


@pytest.mark.verifies(LOAD)
def test_a_mesh_of_some_ranks_is_refused(world, tmp_path):
    save_hf(XtrainModel(config_of()), tmp_path)
    world(3).run(half_a_world, tmp_path)


@pytest.mark.verifies(CONFIG, "xtrain.model.hf_config:config_to_hf")
def test_both_spellings_of_rotary_positions_are_read():
    config = config_of()
    old = config_to_hf(config, "float32")
    assert config_from_hf(old) == config
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert config_from_hf(new) == config
    plain = config_of(rope_scaling=None, rope_theta=5e5)
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert config_from_hf(new) == plain
    assert config_from_hf(config_to_hf(plain, "float32")) == plain


@pytest.mark.verifies(SAVE)
def test_the_file_says_what_libraries_look_for(tmp_path):
    save_hf(XtrainModel(config_of(), dtype=torch.bfloat16), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"]
    assert values["torch_dtype"] == "bfloat16"
