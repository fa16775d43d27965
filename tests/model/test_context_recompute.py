"""Context ranks with recompute, autocast, published files and a model on meta."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.devices import device_type
from tests.model.twins import Case, Twins, check_weights, config_of, sparse_batch
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel, load_hf, save_hf
from xtrain.pipeline_parallel import checkpoint

MODEL = "xtrain.model.decoder:XtrainModel"
CUT = "xtrain.model.context:SequenceCut"
CASES = [
    Case(context=2),
    Case(context=2, tensor=2, attention="all_gather", sequence_parallel=True),
    Case(context=2, tensor=2, attention="ulysses"),
    Case(context=4),
]


def recomputed(recompute) -> None:
    """Every layer runs forward again in backward, and with it what attention sends."""
    for case in CASES:
        if case.context * case.tensor == dist.get_world_size():
            twins = Twins(case)
            for layer in twins.cut.layers:
                layer.forward = partial(recompute, layer.forward)
            twins.train()


RECOMPUTE = {
    "ours": checkpoint,
    "torch's": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
}


@pytest.mark.verifies(MODEL, CUT, "xtrain.pipeline_parallel.recompute:checkpoint")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_layers_that_are_recomputed_train_as_one_device(world, recompute):
    world(4).run(recomputed, RECOMPUTE[recompute])


def under_autocast() -> dict[str, float]:
    """Of each attention, how far its gradients are from those in float64, as shares.

    And how far one device's under autocast are: as rounding alone.
    """
    found = {}
    tokens, labels = sparse_batch(2)
    config = config_of(num_key_value_heads=2)
    right = XtrainModel(config, dtype=torch.float64)
    right.loss(tokens, labels).backward()
    meshes = {
        "one device": None,
        "context": init_mesh((4,), ("context",)),
        "and tensor": init_mesh((2, 2), ("context", "tensor")),
    }
    for attention in ("ring", "all_gather", "ulysses"):
        for axes, mesh in meshes.items():
            model = XtrainModel(config, mesh, context_attention=attention)
            with torch.autocast(device_type(), torch.bfloat16):
                loss = model.loss(tokens, labels)
            loss.backward()
            model.sync_gradients()
            errors = []
            for name, parameter in model.named_parameters():
                place = model.placement(name)
                exact = place.of(right.get_parameter(name).grad)
                error = (parameter.grad.double() - exact).norm() / exact.norm()
                errors.append(error.item())
            assert parameter.grad.dtype == torch.float32
            found[f"{attention}, {axes}"] = max(errors)
    return found


@pytest.mark.verifies(MODEL, CUT)
def test_under_autocast_to_bf16_it_rounds_as_one_device_does(world):
    for errors in world(4).run(under_autocast):
        alone = max(error for what, error in errors.items() if "one device" in what)
        assert 1e-3 < alone < 0.1
        for what, error in errors.items():  # tensor ranks round their partial sums, too
            most = 2.5 if "tensor" in what else 1.5
            assert error < most * alone, (what, errors)


def files(directory) -> None:
    """Published weights: read and written on context ranks as on one device."""
    mesh = init_mesh((2, 2), ("context", "tensor"))
    config = config_of(num_key_value_heads=1, seed=3)
    whole = XtrainModel(config)
    save_hf(XtrainModel(config, mesh), directory)
    cut = load_hf(directory, mesh, context_attention="ulysses")
    check_weights(cut, whole, "read")
    alone = load_hf(directory, init_mesh((4,), ("context",)), dtype=torch.float64)
    check_weights(alone.float(), whole, "read whole")
    tokens = sparse_batch(0)[0]
    torch.testing.assert_close(cut(tokens, gather_logits=True), whole(tokens))


@pytest.mark.verifies(
    CUT, "xtrain.model.hf_load:load_hf", "xtrain.model.hf_save:Collector"
)
def test_published_files_are_read_and_written_on_context_ranks(world, tmp_path):
    world(4).run(files, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def from_meta() -> None:
    mesh = init_mesh((2,), ("context",))
    later = XtrainModel(config_of(), mesh, device="meta")
    later.to_empty(device=torch.get_default_device())
    later.reset_parameters()
    tokens = sparse_batch(0)[0]
    whole = XtrainModel(config_of())
    torch.testing.assert_close(later(tokens, gather_logits=True), whole(tokens))


@pytest.mark.verifies(MODEL, CUT)
def test_a_model_from_the_meta_device_attends_over_the_ranks(world):
    world(2).run(from_meta)
