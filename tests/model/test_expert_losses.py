"""What routers add to the loss, and what their biases count, on one device."""

import math

import pytest
import torch

from tests.model.configs import config_of
from tests.model.test_decoder import batch, model_of
from xtrain.expert_parallel import load_balancing_loss, router_z_loss
from xtrain.model import XtrainModel
from xtrain.model.auxiliary_losses import auxiliary_loss
from xtrain.pipeline_parallel import checkpoint

AUX = "xtrain.model.auxiliary_losses:auxiliary_loss"
BIAS = "xtrain.model.balance:CopyCounts"
UPDATE = "xtrain.model.balance:update_biases"


@pytest.mark.verifies(AUX)
def test_the_losses_are_those_of_all_layers_tokens_together():
    """k times the load-balancing loss, which is 1 with equal loads."""
    tokens, labels = batch()
    plain = model_of("Mixtral")
    alone = plain(tokens, labels)
    routings = list(plain.routings().values())
    assert len(routings) == plain.config.num_hidden_layers == 2
    probabilities = torch.cat([r.probabilities_TE for r in routings])
    experts = torch.cat([r.experts_Tk for r in routings])
    balance = 2 * load_balancing_loss(probabilities, experts)
    z = router_z_loss(torch.cat([r.logits_TE for r in routings]))
    found = {}
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        model = model_of("Mixtral", **{name: 0.25})
        found[name] = (model(tokens, labels) - alone).item() / 0.25
    assert math.isclose(found["router_aux_loss_coef"], balance.item(), rel_tol=1e-10)
    assert math.isclose(found["router_z_loss_coef"], z.item(), rel_tol=1e-10)


@pytest.mark.verifies(AUX)
def test_a_model_whose_coefficients_are_0_adds_nothing():
    model = model_of("DeepSeek")
    model(*batch())
    assert auxiliary_loss(model.config, model.routings()) == 0.0
    dense = model_of("one head")
    dense(*batch())
    assert dense.routings() == {}


def biased(dtype=torch.float64) -> XtrainModel:
    return XtrainModel(config_of("DeepSeek", balance_bias=True), dtype=dtype)


@pytest.mark.verifies(BIAS, UPDATE)
def test_biases_move_by_the_copies_of_every_micro_batch_trained_on():
    """Not by those of an evaluation, nor twice by those of a recomputed forward."""
    model = biased()
    expected = torch.zeros(3, 6, dtype=torch.int64)
    for seed in range(3):
        checkpoint(model, *batch(seed)).backward()
        for layer, routing in model.routings().items():
            expected[layer] += routing.counts_E
    with torch.no_grad():
        model(*batch(7))
    assert torch.equal(model.copies.table(torch.device("cpu")), expected)
    assert expected.sum(1).tolist() == [0, 120, 120]  # 3 batches, 10 tokens, k = 4
    model.update_balance_biases(0.25)
    for layer in (1, 2):
        bias = model.layers[layer].mlp.router.balance_bias
        assert torch.equal(bias, 0.25 * (20.0 - expected[layer]).sign())
    assert model.copies.by_layer == {}
    model.update_balance_biases(0.25)  # nothing was counted: nothing moves
    assert torch.equal(bias, 0.25 * (20.0 - expected[2]).sign())


@pytest.mark.verifies("xtrain.model.span:DecoderSpan")
def test_biases_stay_in_fp32_and_begin_with_zeros_from_the_meta_device():
    model = biased(torch.bfloat16)
    later = XtrainModel(model.config, device="meta", dtype=torch.bfloat16)
    later.to_empty(device="cpu")
    later.reset_parameters()
    for both in (model, later):
        (first, second) = both.buffers()
        assert first.dtype == torch.float32 and not first.any() and not second.any()
    for name, parameter in later.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    model.update_balance_biases(0.5)
    assert model.to(torch.float16).layers[1].mlp.router.weight.dtype == torch.float16
    assert next(model.buffers()).dtype == torch.float32
