"""Ranks that would make different models, or bring different batches of one, are told.

The last rank alone differs; every rank raises, and the next call works on all.
"""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.devices import skip_unless_mistakes_are_told
from tests.model.twins import MIXTRAL, batch, config_of
from xtrain.checkpoint import CheckpointError
from xtrain.comm import CommLedger, debug_checks, init_mesh
from xtrain.model import RopeScaling, XtrainModel, load_hf, load_hf_stages, save_hf
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES

SAME = "xtrain.model.checks:check_same_config"
BATCH = "xtrain.model.decoder_parts:DecoderParts"

FIELDS = {
    "seed": 1,
    "vocab_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "rope_scaling": RopeScaling(factor=6.0, original_max_position_embeddings=120),
    "tie_word_embeddings": True,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "scoring_func": "sigmoid",
    "router_aux_loss_coef": 0.1,
    "n_shared_experts": 1,
}
OPTIONS = {
    "dtype": torch.float64,
    "sequence_parallel": True,
    "context_attention": "all_gather",
    "context_balance": "striped",
}


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def told(what: str, call) -> str:
    """What every rank is told of the last one's choice."""
    with pytest.raises((ValueError, CheckpointError), match=f"different {what}") as e:
        call()
    assert len(str(e.value)) <= 200
    return str(e.value)


def whole_models(shape, axes) -> list[str]:
    """With one field or option other than on the other ranks, each in turn."""
    mesh, right, said = init_mesh(shape, axes), config_of(**MIXTRAL), []
    for name, value in FIELDS.items():
        config = dataclasses.replace(right, **({name: value} if is_last() else {}))
        what = name + (".factor" if name == "rope_scaling" else "")
        said.append(told(what, lambda c=config: XtrainModel(c, mesh)))
    for name, value in OPTIONS.items():
        options = {name: value} if is_last() else {}
        said.append(told(name, lambda o=options: XtrainModel(right, mesh, **o)))
    if len(axes) > 1:
        other = init_mesh(shape, axes[::-1] if is_last() else axes)
        said.append(told("mesh", lambda: XtrainModel(right, other)))
        size = dist.get_world_size()
        turned = init_mesh((1, size) if is_last() else (size, 1), axes)
        said.append(told("mesh", lambda: XtrainModel(right, turned)))
    with pytest.raises(ValueError, match=rf"rank {dist.get_world_size() - 1}: config"):
        XtrainModel("a config" if is_last() else right, mesh)
    default = torch.get_default_dtype()
    XtrainModel(right, mesh, dtype=default if is_last() else None)
    XtrainModel(right, mesh, device="meta" if is_last() else None)
    return said


@pytest.mark.verifies(SAME, "xtrain.model.decoder:XtrainModel")
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2,), ("tensor",)), ((3,), ("data",)), ((2, 2), ("expert_data", "tensor"))],
)
def test_a_config_or_option_of_one_rank_is_an_error_on_all(world, shape, axes):
    size = torch.Size(shape).numel()
    found = world(size).run(whole_models, shape, axes)
    assert all(one == found[0] for one in found)
    assert found[0][0] == (
        f"ranks 0 and {size - 1} have different seed: seed is 0 and 1"
    )


def part_of_a_world() -> None:
    """Its axes alone reach all ranks of such a mesh; one rank of four is seeded so."""
    ranks = torch.arange(4).view(2, 2)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("data", "tensor"))
    if mesh.get_coordinate() is not None:
        config = config_of(seed=int(dist.get_rank() == 3))
        told("seed", lambda: XtrainModel(config, mesh))
        model, (tokens, labels) = XtrainModel(config_of(), mesh), batch(0)
        with pytest.raises(ValueError, match="^rank 3: ids "):
            model(tokens.clamp(min=24 * (dist.get_rank() == 3)), labels)


@pytest.mark.verifies(
    SAME, "xtrain.model.checks:groups_of", "xtrain.model.loss:sum_unless"
)
def test_so_it_is_on_a_mesh_of_some_ranks(world):
    world(5).run(part_of_a_world)


def stages_and_files(folder) -> None:
    """Three parts on one rank and another cut on the other; another config.json."""
    mesh, schedule = init_mesh((2,), ("pipeline",)), SCHEDULES["gpipe"](2, 2)

    def stages(config=None, kind="gpipe", **options):
        return XtrainModel.stages(
            config or config_of(), mesh, SCHEDULES[kind](2, 2), **options
        )

    layers = config_of(num_hidden_layers=12 if is_last() else 8)
    told("num_hidden_layers", lambda: stages(layers))
    told("sequence", lambda: stages(sequence=64 if is_last() else 1))
    told("schedule", lambda: stages(kind="one_f_one_b" if is_last() else "gpipe"))
    told("dtype", lambda: stages(dtype=torch.float64 if is_last() else None))
    assert stages(device="meta" if is_last() else None)
    for seed in (0, 1):
        config = config_of(initializer_range=0.1 * (1 + seed))
        if dist.get_rank() == 0:
            save_hf(XtrainModel(config), folder / str(seed))
    if dist.get_rank() == 0:
        shutil.copytree(folder / "0", folder / "2")
        values = json.loads((folder / "2" / "config.json").read_text())
        values["rope_theta"] = 77.0
        (folder / "2" / "config.json").write_text(json.dumps(values))
    dist.barrier()
    other = folder / ("2" if is_last() else "0")
    told("rope_theta", lambda: load_hf_stages(other, mesh, schedule))
    data = init_mesh((2,), ("data",))
    told("rope_theta", lambda: load_hf(other, data))
    told("dtype", lambda: load_hf(folder / "0", data, [None, torch.half][is_last()]))
    assert isinstance(load_hf(folder / "0", data), XtrainModel)


@pytest.mark.verifies(
    SAME, "xtrain.model.stages:make_modules", "xtrain.model.hf_load:load_hf"
)
def test_stages_and_files_of_different_models_are_an_error_on_all(world, tmp_path):
    world(2).run(stages_and_files, tmp_path)


def batches(shape, axes) -> list[str]:
    """Tokens, labels, positions or a mask that the last rank has alone."""
    mesh, said = init_mesh(shape, axes), []
    model = XtrainModel(config_of(num_key_value_heads=2), mesh)
    tokens, labels = batch(0)
    positions, mask = torch.arange(12), torch.ones(2, 12, dtype=torch.bool)
    right = {"tokens": tokens, "labels": labels, "positions": positions}
    right["token_mask"] = mask
    for name, tensor in right.items():
        changed = tensor.clone()
        changed[..., -1] = ~changed[..., -1] if name == "token_mask" else 5
        given = right | ({name: changed} if is_last() else {})
        assert model(**given).isfinite()  # it is not asked for
        with debug_checks(), CommLedger() as ledger:
            said.append(told(name, lambda g=given: model(**g)))
        assert not ledger.events, "the question is counted"
    with debug_checks():
        assert model(**right).isfinite()
        if "data" not in axes:
            labels = None if is_last() else labels
            said.append(told("labels", lambda: model(tokens, labels)))
    return said


@pytest.mark.verifies(BATCH, "xtrain.comm.debug_checks:check_same_values")
def test_under_debug_checks_batches_of_tensor_and_context_ranks_are_compared(world):
    assert "checksum" in world(2).run(batches, (2,), ("tensor",))[0][0]
    world(4).run(batches, (2, 2), ("context", "tensor"))


def other_rows() -> None:
    """Data ranks bring other rows, and are not compared."""
    mesh = init_mesh((2,), ("data",))
    with debug_checks():
        assert XtrainModel(config_of(), mesh).loss(*batch(dist.get_rank())).isfinite()


@pytest.mark.verifies(BATCH)
def test_batches_of_data_ranks_may_differ(world):
    world(2).run(other_rows)


def a_step_of_stages() -> None:
    mesh = init_mesh((2, 2), ("pipeline", "tensor"))
    schedule = SCHEDULES["gpipe"](2, 2)
    stages = XtrainModel.stages(config_of(num_key_value_heads=2), mesh, schedule)
    last = stages[-1].module
    loss = last.loss_fn if last.has_head else (lambda *_: None)
    runner = PipelineRunner(stages, schedule, loss, mesh["pipeline"].get_group())
    tokens, labels = batch(0)
    for name, tensor in {"tokens": tokens, "labels": labels}.items():
        given = {"tokens": tokens, "labels": labels}
        if mesh["tensor"].get_local_rank() == 1:
            given[name] = (tensor + 1) % 24
        with debug_checks(), pytest.raises(ValueError, match=f"different {name}"):
            runner.step(*given.values())


@pytest.mark.verifies("xtrain.model.stages:DecoderStage")
def test_under_debug_checks_batches_of_stages_are_compared(world):
    world(4).run(a_step_of_stages)


MISTAKES = {
    "an id": lambda tokens, labels: (tokens + 24, labels),
    "a label": lambda tokens, labels: (tokens, labels - 50),
    "a shape": lambda tokens, labels: (tokens, labels[:, 1:]),
    "a list": lambda tokens, labels: (tokens.tolist(), labels),
    "a list of labels": lambda tokens, labels: (tokens, labels.tolist()),
    "floats": lambda tokens, labels: (tokens.float(), labels),
}


def one_rank_wrong(shape, axes, changes) -> dict[str, str]:
    """The last rank alone is wrong, with labels and without; then a good batch."""
    mesh, found = init_mesh(shape, axes), {}
    model = XtrainModel(config_of(**changes), mesh)
    last = dist.get_world_size() - 1
    for what, mistake in MISTAKES.items():
        pair = batch(0)
        given = mistake(*pair) if is_last() else pair
        with pytest.raises(ValueError, match=rf"rank {last}: ") as caught:
            model(*given)
        found[what] = str(caught.value)
        assert len(found[what]) <= 200
        if given[0] is not pair[0] or what in ("an id", "a list", "floats"):
            with pytest.raises(ValueError, match=rf"rank (1|{last}): "):
                model(given[0])
    with pytest.raises(ValueError, match="token_mask"):
        model(*batch(0), token_mask=torch.ones(2, 12) if is_last() else None)
    assert model.loss(*batch(0)).isfinite()
    return found


@pytest.mark.verifies("xtrain.model.loss:sum_unless", "xtrain.model.loss:count_labels")
@pytest.mark.parametrize(
    ("shape", "axes", "changes"),
    [
        ((2,), ("tensor",), {}),
        ((3,), ("context",), {}),
        ((2, 2), ("context", "tensor"), {"num_key_value_heads": 2}),
        ((2, 2), ("expert", "tensor"), MIXTRAL),
    ],
)
def test_a_batch_that_is_wrong_on_one_rank_of_any_axis_is_an_error_on_all(
    world, xtrain_worlds, shape, axes, changes
):
    skip_unless_mistakes_are_told(xtrain_worlds)
    size = torch.Size(shape).numel()
    found = world(size).run(one_rank_wrong, shape, axes, changes)
    assert all(one == found[0] for one in found)
    assert found[0]["a list"] == f"rank {size - 1}: tokens is a list, not a tensor"
