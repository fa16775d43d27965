"""What our decoder keeps for backward, and the peak of a step, are as predicted."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from xtrain.model import XtrainConfig, XtrainModel
from xtrain.plan import ModelShape
from xtrain.plan.decoder_activations import (
    decoder_activations,
    decoder_layer_activations,
    decoder_peak,
)
from xtrain.testing.live import LiveStorages
from xtrain.testing.saved import SavedTensors

SIZES = [
    {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160,
     "num_attention_heads": 8, "num_key_value_heads": 2},
    {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40,
     "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 10},
]  # fmt: skip


def config(sizes: dict[str, int], layers: int) -> XtrainConfig:
    return XtrainConfig(num_hidden_layers=layers, **sizes)


def saved_bytes(model: XtrainModel, batch: int, sequence: int) -> int:
    """Bytes of all storages that autograd keeps, but parameters and tokens."""
    tokens = torch.randint(0, model.config.vocab_size, (batch, sequence))
    with SavedTensors() as saved:
        model(tokens, labels=tokens)
    return saved.nbytes(but=[*model.parameters(), tokens])


@pytest.mark.verifies("xtrain.plan.decoder_activations:decoder_layer_activations")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "sequence"), [(2, 16), (3, 7)])
def test_a_layer_keeps_exactly_what_is_counted(sizes, dtype, batch, sequence):
    one, two = (
        saved_bytes(XtrainModel(config(sizes, layers), dtype=dtype), batch, sequence)
        for layers in (1, 2)
    )
    shape = config(sizes, 1)
    counted = decoder_layer_activations(shape, batch, sequence, itemsize=dtype.itemsize)
    assert two - one == counted


@pytest.mark.verifies("xtrain.plan.decoder_activations:decoder_activations")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_keeps_what_is_counted(sizes, dtype):
    model = XtrainModel(config(sizes, 3), dtype=dtype)
    counted = decoder_activations(model.config, 2, 16, itemsize=dtype.itemsize)
    assert abs(saved_bytes(model, 2, 16) - counted) <= 16  # the loss and its count


def saved_on_rank(sizes: dict[str, int], sequence_parallel: bool) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    options = {"sequence_parallel": sequence_parallel}
    return saved_bytes(XtrainModel(config(sizes, 2), mesh, **options), 2, 16)


@pytest.mark.verifies("xtrain.plan.decoder_activations:decoder_activations")
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_ranks_keep_their_share(world, size):
    for sequence_parallel in (False, True):
        cut = {"tensor": size, "sequence_parallel": sequence_parallel}
        counted = decoder_activations(config(SIZES[0], 2), 2, 16, **cut)
        for measured in world(size).run(saved_on_rank, SIZES[0], sequence_parallel):
            assert measured == pytest.approx(counted, rel=0.02)


def measured_peak(model: XtrainModel, batch: int, sequence: int) -> int:
    """Most bytes of a second step: the first one has made Adam's moments."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, model.config.vocab_size, (batch, sequence))
    model(tokens, labels=tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    moments = [t for state in optimizer.state.values() for t in state.values()]
    with LiveStorages([*model.parameters(), *moments]) as live:
        model(tokens, labels=tokens).backward()
        optimizer.step()
    return live.most


@pytest.mark.verifies("xtrain.plan.decoder_activations:decoder_peak")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("batch", "sequence"), [(1, 2), (2, 16), (4, 96)])
def test_the_peak_of_a_step(sizes, batch, sequence):
    """Whether states or activations are most of it."""
    model = XtrainModel(config(sizes, 3))
    counted = decoder_peak(model.config, batch, sequence)
    assert measured_peak(model, batch, sequence) == pytest.approx(counted, rel=0.1)


@pytest.mark.verifies("xtrain.plan.decoder_activations:decoder_layer_activations")
def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="batch=0"):
        decoder_activations(config(SIZES[0], 1), 0, 16)
    with pytest.raises(ValueError, match="num_local_experts=8"):
        decoder_layer_activations(ModelShape.preset("mixtral-8x7b"), 1, 16)
