"""Checkpoints of torch's, written and read."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from xtrain.checkpoint import (
    CheckpointError,
    Shard,
    latest,
    load_checkpoint,
    save_checkpoint,
)
from xtrain.checkpoint.torch_format import export_torch, import_torch

SYMBOLS = (
    "xtrain.checkpoint.torch_format:export_torch",
    "xtrain.checkpoint.torch_format:import_torch",
)


def model_of(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    model[1].bfloat16()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) + parameter.detach()
    optimizer.step()


def shards_of(model: nn.Module) -> list[Shard]:
    """Every parameter, whole."""
    return [
        Shard(name, tuple(p.shape), (0,) * p.dim(), p)
        for name, p in model.named_parameters()
    ]


@pytest.mark.verifies(*SYMBOLS)
def test_there_and_back_everything_is_the_same(tmp_path):
    model, optimizer = model_of(0)
    step(model, optimizer)
    path = save_checkpoint(tmp_path / "a", 7, shards_of(model), optimizer, {"x": [1]})
    export_torch(tmp_path / "a", tmp_path / "torch")
    again = import_torch(tmp_path / "torch", tmp_path / "b")
    assert again == latest(tmp_path / "b") and again.name == path.name
    other, optimizer_2 = model_of(1)
    assert load_checkpoint(again, shards_of(other), optimizer_2) == (7, {"x": [1]})
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    step(model, optimizer)
    step(other, optimizer_2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)  # its moments and counts were the same


@pytest.mark.verifies(*SYMBOLS)
def test_torch_reads_the_weights_into_a_model(tmp_path):
    model, optimizer = model_of(0)
    save_checkpoint(tmp_path / "a", 1, shards_of(model), optimizer)
    export_torch(tmp_path / "a", tmp_path / "torch")
    other, _ = model_of(1)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "torch"), no_dist=True)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.verifies(*SYMBOLS)
def test_what_torch_has_saved_is_read_here(tmp_path):
    model, _ = model_of(0)
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path / "torch"), no_dist=True)
    path = import_torch(tmp_path / "torch", tmp_path / "b", step=3)
    other, _ = model_of(1)
    assert load_checkpoint(path, shards_of(other)) == (3, None)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.verifies(*SYMBOLS)
def test_what_is_none_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint of torch's"):
        import_torch(tmp_path / "nothing", tmp_path / "b")
    dcp.save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path / "t"), no_dist=True)
    with pytest.raises(CheckpointError, match='has no tensor below "model"'):
        import_torch(tmp_path / "t", tmp_path / "b")
    two = {"model": {"a": torch.ones(2)}, "other": torch.ones(2)}
    dcp.save(two, checkpoint_id=str(tmp_path / "u"), no_dist=True)
    with pytest.raises(CheckpointError, match="other is no tensor of a model"):
        import_torch(tmp_path / "u", tmp_path / "b")
    assert not Path(tmp_path / "b").exists()
