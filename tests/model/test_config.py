"""Sizes that agree with `xtrain.plan`, and what a config or a call refuses."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.model.configs import CONFIGS, EXPERTS, ODD, VOCABULARY, config_of
from xtrain.model import RopeScaling, XtrainConfig, XtrainModel
from xtrain.plan.shapes import PRESETS


@pytest.mark.verifies(
    "xtrain.plan.shapes:ModelShape", "xtrain.model.decoder:XtrainModel"
)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_on_the_meta_device_has_as_many_parameters_as_planned(name):
    config = XtrainConfig.preset(name)
    model = XtrainModel(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == config.parameters


@pytest.mark.verifies(
    "xtrain.plan.shapes:ModelShape", "xtrain.model.decoder:XtrainModel"
)
@pytest.mark.parametrize("name", [*CONFIGS, *EXPERTS])
def test_small_models_have_as_many_parameters_as_planned(name):
    config = config_of(name)
    model = XtrainModel(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    layer = sum(p.numel() for p in model.layers[-1].parameters())
    assert layer == config.layer_parameters


@pytest.mark.verifies(
    "xtrain.plan.shapes:ModelShape", "xtrain.model.decoder:XtrainModel"
)
@pytest.mark.parametrize("name", CONFIGS)
def test_torch_counts_as_many_flops_as_planned(name):
    """On the meta device, where attention counts all pairs of positions."""
    from torch.utils.flop_counter import FlopCounterMode

    config, sequence = config_of(name), 6
    model = XtrainModel(config, device="meta")
    tokens = torch.zeros(3, sequence, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens).backward()
    assert counter.get_total_flops() == 18 * config.flops_per_token(sequence)


FEW = EXPERTS["Mixtral"]


@pytest.mark.verifies("xtrain.model.config:XtrainConfig")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 0}, "hidden_size=0 is not an int of at least 1"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 is not a finite number above 0"),
        ({"rope_theta": "1"}, "rope_theta='1' is not a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a finite number"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True is not a finite number"),
        ({"initializer_range": float("inf")}, "initializer_range=inf is not"),
        ({"seed": -1}, "seed=-1 is not an int of at least 0"),
        ({"rope_scaling": {"factor": 8}}, "rope_scaling={'factor': 8} is neither"),
        ({"balance_bias": True}, "balance_bias=True of a model without experts"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1 of a model without"),
        (FEW | {"balance_bias": 1}, "balance_bias=1 is not a bool"),
        (FEW | {"router_z_loss_coef": -1.0}, "router_z_loss_coef=-1.0 is not a finite"),
        (FEW | {"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0 is not"),
        (FEW | {"scoring_func": "tanh"}, "score='tanh' is neither"),
        (FEW | {"n_group": 2}, "groups=2, top_groups=1: 5 experts need groups"),
    ],
)
def test_a_bad_value_is_refused_with_its_rule(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        XtrainConfig(**(ODD | changes))


@pytest.mark.verifies("xtrain.tensor_parallel.rope:RopeScaling")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"factor": -1.0}, "factor=-1.0 is not a finite number above 0"),
        ({"low_freq_factor": 4.0}, "low_freq_factor=4.0 is not below high_freq_factor"),
        ({"original_max_position_embeddings": 0}, "embeddings=0 is not an int"),
    ],
)
def test_a_bad_scaling_is_refused_with_its_rule(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        RopeScaling(**changes)


TOKENS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.verifies("xtrain.model.decoder:XtrainModel")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"tokens": TOKENS[0]}, "tokens of shape [5] and torch.int64 are not integers"),
        ({"tokens": TOKENS.float()}, "tokens of shape [2, 5] and torch.float32"),
        ({"labels": TOKENS[:, 1:]}, "labels of shape [2, 4] and torch.int64 are not"),
        ({"labels": TOKENS.double()}, "labels of shape [2, 5] and torch.float64"),
        ({"labels": TOKENS + VOCABULARY}, f"{VOCABULARY}"),
        ({"positions": TOKENS[:, :1]}, "positions of shape [2, 1] and torch.int64"),
        ({"positions": TOKENS[0].float()}, "positions of shape [5] and torch.float32"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_before_the_first_layer(call, said):
    model, ran = XtrainModel(config_of("one head")), []
    model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=re.escape(said)):
        model(**({"tokens": TOKENS} | call))
    assert not ran
    assert model(TOKENS, TOKENS) > 0
    assert ran


def build_on(shape, names):
    """What a model on this mesh says on this rank; None where it is built."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        XtrainModel(config_of("one head"), mesh)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.verifies("xtrain.model.decoder:XtrainModel")
def test_a_mesh_axis_that_cannot_cut_the_model_is_refused_on_every_rank(world):
    run = world(2).run
    for axis, hint in (
        ("pipeline", "XtrainModel.stages(config, mesh, schedule)"),
        ("expert", "this model has no experts, num_local_experts=0"),
        ("other", "known axes are data, expert_data, expert, context, tensor"),
    ):
        for said in run(build_on, (1, 2), ("context", axis)):
            assert said.startswith(f"mesh axis {axis!r} has size 2"), said
            assert hint in said


@pytest.mark.verifies("xtrain.model.decoder:XtrainModel")
def test_sizes_that_do_not_divide_are_refused_on_every_rank(world):
    said = world(2).run(build_on, (2,), ("tensor",))
    rule = "11 rows of the vocabulary are not divisible by 2 tensor ranks"
    assert said == [f"{rule}: set padded_vocab_size=12"] * 2


@pytest.mark.verifies("xtrain.model.decoder:XtrainModel")
def test_a_mesh_of_one_rank_cuts_nothing(world):
    assert world(1).run(build_on, (1, 1), ("data", "tensor")) == [None]
