"""Published files straight into stages, and out of them."""

import pytest
import torch
import torch.distributed as dist

from tests.model.stage_training import Layout
from tests.model.test_hf import counted_reads, written
from tests.model.twins import config_of
from xtrain.checkpoint import CheckpointError
from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainModel, load_hf, load_hf_stages, save_hf
from xtrain.pipeline_parallel import PipelineStage
from xtrain.schedules import SCHEDULES, gpipe
from xtrain.zero import FullyShardedDataParallel

LOAD = "xtrain.model.hf_load:load_hf_stages"
SAVE = "xtrain.model.hf_save:save_hf"
COLLECT = "xtrain.model.hf_save:Collector"
DEEP = {"num_hidden_layers": 5, "num_key_value_heads": 2}
TIED = DEEP | {"tie_word_embeddings": True}


def made(changes, dtype=torch.float32) -> XtrainModel:
    """A model whose every element is another, with names beyond one digit's order."""
    model = XtrainModel(config_of(**changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.linspace(1, 2, parameter.numel()).view_as(parameter))
    return model


def round_trip(folder, layouts, changes, dtype, most) -> None:
    """Into stages and out again: every tensor, file and name as the whole model's."""
    whole = made(changes, dtype)
    for number, layout in enumerate(layouts):
        mesh = layout.mesh()
        schedule, out = layout.made(), folder / f"{number}"
        stages = load_hf_stages(folder / "whole", mesh, schedule)
        assert [stage.index for stage in stages] == [
            *schedule.stages_of(mesh["pipeline"].get_local_rank())
        ]
        for stage in stages:
            for name, parameter in stage.module.named_parameters():
                right = stage.module.placement(name).of(whole.get_parameter(name))
                assert parameter.dtype == dtype and torch.equal(parameter, right), name
            for name, parameter in stage.shared.items():
                assert dict(stage.module.named_parameters())[name] is parameter
        save_hf(stages, out, max_file_bytes=most)
        dist.barrier()
        expected, found = written(folder / "whole"), written(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found), layout
        files = {path.name: path.stat().st_size for path in out.iterdir()}
        before = {p.name: p.stat().st_size for p in (folder / "whole").iterdir()}
        assert files == before
        for name in files:
            if name.endswith(".json"):
                assert (out / name).read_text() == (folder / "whole" / name).read_text()
        assert len(files) == 2 if most > 10**6 else len(files) > 5


@pytest.mark.verifies(LOAD, SAVE, COLLECT)
@pytest.mark.parametrize(
    ("layouts", "changes", "dtype", "most"),
    [
        ([Layout("interleaved", 1)], DEEP, torch.float32, 10**9),
        ([Layout("zb_v", 2), Layout("dualpipe", 2)], TIED, torch.bfloat16, 1500),
        ([Layout("one_f_one_b", 3)], DEEP, torch.float64, 10**9),
        ([Layout("interleaved", 2, 1, 2), Layout("chimera", 2, 2)], TIED,
         torch.float32, 3000),
        ([Layout("gpipe", 4)], DEEP, torch.float16, 10**9),
    ],
)  # fmt: skip
def test_into_stages_and_out_every_file_is_the_whole_models(
    world, tmp_path, layouts, changes, dtype, most
):
    save_hf(made(changes, dtype), tmp_path / "whole", max_file_bytes=most)
    world(layouts[0].size).run(round_trip, tmp_path, layouts, changes, dtype, most)
    again = load_hf(tmp_path / "0")
    for name, parameter in made(changes, dtype).named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)


def elements_read(folder) -> tuple[int, int]:
    """All elements that leave the files on this rank, and those of its stages."""
    mesh = init_mesh((2, 2), ("pipeline", "tensor"))
    with counted_reads() as counted:
        stages = load_hf_stages(folder, mesh, SCHEDULES["interleaved"](2, 4))
    sizes = [p.numel() for stage in stages for p in stage.module.parameters()]
    return sum(counted), sum(sizes)


@pytest.mark.verifies(LOAD, "xtrain.model.hf_load:fill")
@pytest.mark.parametrize("most", [10**9, 1500], ids=["one file", "several"])
def test_a_rank_reads_its_own_stages_only(world, tmp_path, most):
    model = made(DEEP)
    save_hf(model, tmp_path, max_file_bytes=most)
    whole = sum(parameter.numel() for parameter in model.parameters())
    found = world(4).run(elements_read, tmp_path)
    for read, own in found:
        assert read == own < whole / 3
    assert whole < sum(read for read, _ in found) < 1.1 * whole  # norms: on two ranks


def refused(folder) -> None:
    mesh = init_mesh((2,), ("pipeline",))
    with pytest.raises(ValueError, match='for 3 ranks, .*"pipeline" has 2'):
        load_hf_stages(folder, mesh, gpipe(3, 3))
    with pytest.raises(CheckpointError, match=r"20 virtual stages of 5 layers"):
        load_hf_stages(folder, mesh, SCHEDULES["interleaved"](2, 2, 10))
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        load_hf_stages(folder / "nowhere", mesh, gpipe(2, 2))
    stages = XtrainModel.stages(config_of(**DEEP), mesh, gpipe(2, 2))
    alone = init_mesh((2, 1), ("pipeline", "data"))["data"].get_group()
    wrapper = DistributedDataParallel(stages[0].module, process_group=alone)
    save_hf([PipelineStage(wrapper, dist.get_rank(), 2)], folder / "wrapped")
    foreign = [PipelineStage(torch.nn.Linear(2, 2), dist.get_rank(), 2)]
    with pytest.raises(ValueError, match="is a Linear: give the"):
        save_hf(foreign, folder / "out")


@pytest.mark.verifies(LOAD, "xtrain.model.stages:check_pipeline")
def test_what_does_not_fit_is_refused_on_every_rank(world, tmp_path):
    save_hf(made(DEEP), tmp_path)
    world(2).run(refused, tmp_path)
    assert not (tmp_path / "out").exists()
    save_hf(XtrainModel(config_of(**DEEP)), tmp_path / "dense")
    dense, wrapped = (
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("dense", "wrapped")
    )
    assert wrapped == dense


def missing_in_another_stage(folder) -> None:
    mesh = init_mesh((2,), ("pipeline",))
    with pytest.raises(CheckpointError, match=r"model\.layers\.5\.\S+: left over"):
        load_hf_stages(folder, mesh, gpipe(2, 2))


@pytest.mark.verifies(LOAD, "xtrain.model.hf_names:whole_shapes")
def test_a_tensor_too_many_is_named_by_every_rank(world, tmp_path):
    """Also by the rank whose own tensors are all there."""
    save_hf(made(DEEP | {"num_hidden_layers": 6}), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('hidden_layers": 6', 'hidden_layers": 5')
    )
    world(2).run(missing_in_another_stage, tmp_path)


def sharded(folder) -> None:
    mesh = init_mesh((1, 2), ("pipeline", "data"))
    stages = XtrainModel.stages(config_of(**DEEP), mesh, gpipe(1, 1))
    FullyShardedDataParallel(stages[0].module, process_group=mesh["data"].get_group())
    with pytest.raises(ValueError, match="a wrapper has sharded it"):
        save_hf(stages, folder / "out")


@pytest.mark.verifies("xtrain.model.hf_names:check_own_shapes")
def test_stages_that_a_wrapper_has_sharded_are_not_saved(world, tmp_path):
    world(2).run(sharded, tmp_path)
    assert not (tmp_path / "out").exists()
