"""Checkpoints in Hugging Face's layout: into shards, out of them, what is refused."""

import json
import os
import re
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from tests.model.twins import batch, close, config_of
from xtrain.checkpoint import CheckpointError
from xtrain.checkpoint.bare_file import opened_safetensors
from xtrain.cluster.per_rank import replaced
from xtrain.comm import init_mesh
from xtrain.model import (
    XtrainModel,
    hf_files,
    hf_load,
    load_hf,
    load_hf_stages,
    save_hf,
)
from xtrain.model.hf_config import config_from_hf, config_to_hf
from xtrain.schedules import SCHEDULES
from xtrain.zero import FullyShardedDataParallel

LOAD = "xtrain.model.hf_load:load_hf"
SAVE = "xtrain.model.hf_save:save_hf"
CONFIG = "xtrain.model.hf_config:config_from_hf"
SIX_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}


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


@pytest.mark.verifies(LOAD, SAVE, "xtrain.model.hf_save:_collect_and_write")
@pytest.mark.parametrize(
    ("sizes", "axes", "changes", "dtype", "most"),
    [
        ((1,), ("tensor",), {}, torch.float32, 10**9),
        ((2,), ("tensor",), {"tie_word_embeddings": True}, torch.bfloat16, 1500),
        ((3,), ("tensor",), {"num_key_value_heads": 1}, torch.float16, 10**9),
        ((4,), ("tensor",), {"num_key_value_heads": 2}, torch.float32, 3000),
        ((2, 2), ("data", "tensor"), {"rope_scaling": None}, torch.float64, 10**9),
        ((3,), ("expert",), SIX_EXPERTS, torch.float32, 10**9),
    ],
)
def test_into_shards_and_back_every_bit_and_dtype_is_kept(
    world, tmp_path, sizes, axes, changes, dtype, most
):
    size = torch.Size(sizes).numel()
    world(size).run(round_trip, tmp_path, sizes, axes, changes, dtype, most)


class Watched:
    """An opened file that counts the elements it hands out; nothing whole leaves it."""

    def __init__(self, opened, counted: list[int]):
        self.opened, self.counted = opened, counted

    def keys(self):
        return self.opened.keys()

    def get_slice(self, name):
        return WatchedSlice(self.opened.get_slice(name), self.counted)


class WatchedSlice:
    def __init__(self, part, counted: list[int]):
        self.part, self.counted = part, counted

    def get_shape(self):
        return self.part.get_shape()

    def __getitem__(self, ranges):
        found = self.part[ranges]
        self.counted.append(found.numel())
        return found


@contextmanager
def counted_reads():
    """How many elements leave the files, range by range."""
    counted: list[int] = []

    @contextmanager
    def watching(path):
        with opened_safetensors(path) as opened:
            yield Watched(opened, counted)

    with replaced(hf_load, "opened_safetensors", watching):
        yield counted


def elements_read(folder) -> tuple[int, int]:
    """All elements that leave the files, and the most at once."""
    with counted_reads() as counted:
        model = load_hf(folder, init_mesh((dist.get_world_size(),), ("tensor",)))
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert sum(counted) == sum(sizes)
    assert max(counted) == max(sizes)
    return sum(counted), max(counted)


@pytest.mark.verifies(LOAD, "xtrain.model.hf_load:fill")
@pytest.mark.parametrize("most", [10**9, 1500], ids=["one file", "several"])
def test_a_rank_reads_its_own_elements_only_one_range_at_a_time(world, tmp_path, most):
    save_hf(XtrainModel(config_of()), tmp_path, max_file_bytes=most)
    (whole, largest), *_ = world(1).run(elements_read, tmp_path)
    for read, at_once in world(4).run(elements_read, tmp_path):
        assert whole / 4 < read < whole / 3  # norms are whole on every rank
        assert at_once == largest // 4


MEGABYTE = 2**20


def memory_of_its_own() -> int:
    """Bytes of this process that are no pages of a file."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


def grows_by_its_shards(folder) -> tuple[int, int]:
    """The most that this process has grown while it read, and what it holds now."""
    mesh = init_mesh((4,), ("tensor",))
    seen, read_box = [], hf_load.read_box

    def watching(*args):
        found = read_box(*args)
        seen.append(memory_of_its_own())
        return found

    before = memory_of_its_own()
    with replaced(hf_load, "read_box", watching):
        model = load_hf(folder, mesh)
    most = max(*seen, memory_of_its_own())
    return most - before, sum(p.nbytes for p in model.parameters())


@pytest.mark.verifies(LOAD)
def test_loading_takes_the_memory_of_the_shards_and_no_more(world, tmp_path):
    """The file is mapped, and a range goes straight into its parameter."""
    if sys.platform != "linux" or world(4).device != "cpu":
        pytest.skip("needs Linux to tell how much memory a process has of its own")
    config = config_of(vocab_size=8192, hidden_size=256, intermediate_size=4096)
    model = XtrainModel(config)
    save_hf(model, tmp_path)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    world(4).run(grows_by_its_shards, tmp_path)  # warm: imports, meta shapes
    for grown, held in world(4).run(grows_by_its_shards, tmp_path):
        assert held < whole / 3
        assert grown < held + 4 * MEGABYTE < whole / 2


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
        ({"attention_dropout": 1.5}, "attention_dropout=1.5"),
    ):
        (folder / "config.json").write_text(json.dumps(values | change))
        yield str(change), said
    (folder / "config.json").write_text(json.dumps(values | {"rope_scaling": [1]}))
    yield "rope", "are not a table"
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
    for file in ("../secret.safetensors", 5):
        index = json.dumps({"weight_map": {name: file}})
        (folder / "model.safetensors.index.json").write_text(index)
        yield f"path {file!r}", "is not a file of the directory"


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


HOSTILE = {
    "layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 is above"),
    "missing": ({"num_hidden_layers": 10**4}, "num_hidden_layers=10000, .* 21 tens"),
    "size": (
        {"hidden_size": 2**63},
        "hidden_size=9223372036854775808 is above",
    ),
    "digits": ({"vocab_size": 10**400}, "config.json: vocab_size=1000000.* is above"),
    "product": (
        {
            "vocab_size": 2**31 - 1,
            "intermediate_size": 2**31 - 1,
            "head_dim": 2**31 - 2,
        },
        "config.json: sizes that no tensor has|do not fit",
    ),
    "text": ({"hidden_size": "7"}, "config.json: hidden_size='7' is not an int"),
    "null": ({"rope_theta": None}, "config.json: rope_theta=None is not a finite"),
    "no float": ({"rope_theta": 10**400}, "rope_theta=1|rope_theta is above 1.8e"),
    "eps": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' is not a finite number"),
    "model": ({"model_type": []}, r"config.json: model_type=\[\]"),
    "window": ({"sliding_window": 4096}, "config.json: sliding_window=4096"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "partial, new": (
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
        "partial_rotary_factor=0.5",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config={"),
    "both ways": ({"is_causal": False}, "is_causal=False, which this model has not"),
    "key heads": ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
    "tied": ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' is not a bool"),
}


def refuses_all(folder) -> None:
    mesh = init_mesh((2,), ("tensor",))
    for number, (_, said) in enumerate(HOSTILE.values()):
        with pytest.raises(CheckpointError, match=said) as caught:
            load_hf(folder / str(number), mesh)
        assert len(str(caught.value).replace(str(folder), "")) <= 200


@pytest.mark.verifies(LOAD, CONFIG, "xtrain.model.hf_names:check_counts")
def test_a_config_that_no_model_can_have_is_refused_at_once_by_its_field(
    world, tmp_path
):
    save_hf(XtrainModel(config_of()), tmp_path / "good")
    values = json.loads((tmp_path / "good" / "config.json").read_text())
    for number, (change, said) in enumerate(HOSTILE.values()):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        (folder / "config.json").write_text(json.dumps(values | change))
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=said):
            load_hf(folder)
        assert time.monotonic() - began < 30
    world(2).run(refuses_all, tmp_path)


@pytest.mark.verifies("xtrain.model.hf_files:read_json", LOAD)
def test_what_is_no_file_is_neither_waited_at_nor_read(tmp_path):
    save_hf(XtrainModel(config_of()), tmp_path)
    for name in ("config.json", "model.safetensors"):
        good = (tmp_path / name).read_bytes()
        for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")):
            (tmp_path / name).unlink()
            make(tmp_path / name)
            with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
                load_hf(tmp_path)
            if (name == "config.json" and make is os.mkdir) or make is os.mkdir:
                (tmp_path / name).rmdir()
            else:
                (tmp_path / name).unlink()
            (tmp_path / name).write_bytes(good)
    deep = "[" * 10**5 + "]" * 10**5
    (tmp_path / "config.json").write_text(f'{{"model_type": {deep}}}')
    with pytest.raises(CheckpointError, match="config.json cannot be read: nested too"):
        load_hf(tmp_path)
    with mock.patch.object(hf_files, "MOST_BYTES", 100):
        (tmp_path / "config.json").write_text("{" + " " * 100 + "}")
        with pytest.raises(CheckpointError, match="it has more than 100 bytes"):
            load_hf(tmp_path)


@pytest.mark.verifies(CONFIG)
def test_what_a_file_does_not_have_is_as_in_transformers():
    values = config_to_hf(config_of(), "float32")
    for missing in ("num_key_value_heads", "head_dim"):
        values[missing] = None
    values |= {"hidden_size": 14, "num_attention_heads": 7}
    found = config_from_hf(values)
    assert (found.num_key_value_heads, found.head_dim) == (7, 2)
    for kind, eps, theta in (("llama", 1e-6, 1e4), ("mixtral", 1e-5, 1e6)):
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        few = values | experts | {"model_type": kind, "rope_scaling": None}
        for name in ("rms_norm_eps", "rope_theta", "mlp_bias"):
            few.pop(name, None)
        found = config_from_hf(few)
        assert (found.rms_norm_eps, found.rope_theta) == (eps, theta)


KEPT = {"bos_token_id": 1, "eos_token_id": [2, 3], "max_position_embeddings": 4096}
GENERATION = {"temperature": 0.6, "eos_token_id": [2, 3]}


def carries(folder) -> None:
    save_hf(load_hf(folder / "in", init_mesh((2,), ("tensor",))), folder / "cut")
    mesh, schedule = init_mesh((2,), ("pipeline",)), SCHEDULES["gpipe"](2, 2)
    save_hf(load_hf_stages(folder / "in", mesh, schedule), folder / "stages")


@pytest.mark.verifies(LOAD, SAVE)
def test_ids_length_and_generation_config_are_carried_through(world, tmp_path):
    save_hf(XtrainModel(config_of()), tmp_path / "in")
    assert not (tmp_path / "in" / "generation_config.json").exists()
    values = json.loads((tmp_path / "in" / "config.json").read_text())
    assert not KEPT.keys() & values.keys()
    (tmp_path / "in" / "config.json").write_text(json.dumps(values | KEPT))
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(GENERATION))
    save_hf(load_hf(tmp_path / "in"), tmp_path / "whole")
    world(2).run(carries, tmp_path)
    for name in ("whole", "cut", "stages"):
        found = json.loads((tmp_path / name / "config.json").read_text())
        assert found == values | KEPT
        text = (tmp_path / name / "generation_config.json").read_text()
        assert json.loads(text) == GENERATION
