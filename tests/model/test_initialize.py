"""Where weights come from: the parameter's name, whatever else is around it."""

import pytest
import torch

from tests.model.configs import config_of
from xtrain.model import XtrainModel
from xtrain.model.parameters import full_weight, seed_of


@pytest.mark.verifies(
    "xtrain.model.parameters:full_weight", "xtrain.model.decoder:XtrainModel"
)
def test_a_weight_depends_on_its_name_and_the_seed_alone():
    """Neither on other layers, nor on torch's own generator."""
    torch.manual_seed(1)
    model = XtrainModel(config_of("two for one"))
    torch.manual_seed(2)
    longer = XtrainModel(config_of("two for one", num_hidden_layers=3)).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, longer[name]), name
    other = XtrainModel(config_of("two for one", seed=1))
    for name, parameter in other.named_parameters():
        if parameter.dim() == 2:
            assert not torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.verifies("xtrain.model.parameters:full_weight")
def test_no_two_parameters_start_alike():
    model = XtrainModel(config_of("as many key heads", hidden_size=24))
    seeds = {seed_of(name, 0) for name, _ in model.named_parameters()}
    assert len(seeds) == len(list(model.parameters()))
    attention = model.layers[0].self_attn
    first, second = attention.q_proj.weight, attention.k_proj.weight
    assert first.shape == second.shape and not torch.equal(first, second)


@pytest.mark.verifies("xtrain.model.parameters:full_weight")
def test_matrices_have_the_deviation_of_the_config_and_norms_are_ones():
    weight = full_weight("lm_head.weight", (300, 200), 0, 0.02)
    assert abs(weight.std().item() / 0.02 - 1) < 0.02
    assert abs(weight.mean().item()) < 0.0005
    for name in ("norm.weight", "layers.3.input_layernorm.weight"):
        assert torch.equal(full_weight(name, (5,), 0, 0.02), torch.ones(5))


@pytest.mark.verifies("xtrain.model.parameters:full_weight")
def test_they_are_drawn_on_the_cpu_whatever_the_default_device_is():
    for name in ("norm.weight", "lm_head.weight"):
        here = full_weight(name, (3, 2), 0, 0.02)
        with torch.device("meta"):
            there = full_weight(name, (3, 2), 0, 0.02)
        assert torch.equal(here, there)


@pytest.mark.verifies("xtrain.model.decoder:XtrainModel")
@pytest.mark.parametrize("name", ["two for one", "tied"])
def test_a_model_from_the_meta_device_becomes_the_same_model(name):
    whole = XtrainModel(config_of(name)).state_dict()
    with torch.device("meta"):
        around = XtrainModel(config_of(name))
    for model in (around, XtrainModel(config_of(name), device="meta")):
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        model.reset_parameters()
        assert (model.lm_head.weight is model.embed_tokens.weight) == (name == "tied")
        assert all(torch.equal(w, whole[n]) for n, w in model.state_dict().items())


@pytest.mark.verifies("xtrain.model.decoder:XtrainModel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype_starts_from_the_same_numbers(dtype):
    single = XtrainModel(config_of("two for one"), dtype=torch.float32).state_dict()
    for name, weight in XtrainModel(
        config_of("two for one"), dtype=dtype
    ).named_parameters():
        assert weight.dtype == dtype
        assert torch.equal(weight, single[name].to(dtype)), name


def test_a_model_of_another_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        model = XtrainModel(config_of("one head"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
