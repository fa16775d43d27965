"""What routers add to the loss, and what their biases count, on one device."""

import math

import pytest
import torch

from tests.expert_parallel.reference import sequence_loss
from tests.model.configs import config_of
from tests.model.test_decoder import batch, model_of
from xtrain.expert_parallel import Routing, load_balancing_loss, router_z_loss
from xtrain.model import XtrainModel
from xtrain.model.balance import auxiliary_loss
from xtrain.model.config import LOSSES
from xtrain.pipeline_parallel import checkpoint

AUX = "xtrain.model.balance:auxiliary_loss"
BIAS = "xtrain.model.balance:CopyCounts"
UPDATE = "xtrain.model.balance:update_biases"


@pytest.mark.verifies(AUX, "xtrain.model.balance:sequence_loss")
@pytest.mark.parametrize("pooled", [False, True])
def test_the_load_balancing_loss_is_of_each_layer_or_of_all_tokens_together(pooled):
    """k times the load-balancing loss, which is 1 with equal loads."""
    tokens, labels = batch()
    plain = model_of("Mixtral")
    alone = plain(tokens, labels)
    routings = list(plain.routings().values())
    assert len(routings) == plain.config.num_hidden_layers == 2
    probabilities = [r.probabilities_TE for r in routings]
    experts = [r.experts_Tk for r in routings]
    together = load_balancing_loss(torch.cat(probabilities), torch.cat(experts))
    each = torch.stack(list(map(load_balancing_loss, probabilities, experts)))
    assert not torch.isclose(together, each.mean(), rtol=0.01)
    balance = 2 * (together if pooled else each.mean())
    z = router_z_loss(torch.cat([r.logits_TE for r in routings]))
    found = {}
    rows = len(tokens), tokens.shape[1], -1
    sequences = [
        sequence_loss(p.view(rows), e.view(rows))
        for p, e in zip(probabilities, experts, strict=True)
    ]
    for name in LOSSES:
        changes = {name: 0.25, "router_aux_loss_pooled": pooled}
        model = model_of("Mixtral", **changes)
        found[name] = (model(tokens, labels) - alone).item() / 0.25
    assert math.isclose(found["router_aux_loss_coef"], balance.item(), rel_tol=1e-10)
    assert math.isclose(found["router_z_loss_coef"], z.item(), rel_tol=1e-10)
    each = torch.stack(sequences).mean().item()
    assert math.isclose(found["router_sequence_loss_coef"], each, rel_tol=1e-10)


def collapsed(layer: int) -> Routing:
    """Eight experts and 16 tokens, all of them to the one with the layer's number."""
    logits = torch.full((16, 8), -100.0)
    logits[:, layer] = 100.0
    experts = torch.full((16, 1), layer)
    kept = torch.ones(16, 1, dtype=torch.bool)
    gates = torch.ones(16, 1)
    return Routing(experts, gates, logits.softmax(-1), logits, kept)


@pytest.mark.verifies(AUX)
def test_layers_that_collapse_onto_different_experts_look_even_only_when_pooled():
    routings = {layer: collapsed(layer) for layer in range(8)}
    for pooled, expected in ((False, 8.0), (True, 1.0)):
        config = config_of(
            "gates as they are",
            num_local_experts=8,
            num_hidden_layers=8,
            router_aux_loss_coef=1.0,
            router_aux_loss_pooled=pooled,
        )
        assert math.isclose(float(auxiliary_loss(config, routings)), expected)


PADDED = dict.fromkeys(LOSSES, 0.25)


@pytest.mark.verifies(AUX, "xtrain.model.layer:DecoderLayer")
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek"])
def test_padding_changes_neither_loss_nor_gradients_nor_loads(name):
    """Three more tokens on the right, of which the mask tells."""
    tokens, labels = batch()
    longer = [torch.nn.functional.pad(tokens, (0, 3), value=1)]
    longer.append(torch.nn.functional.pad(labels, (0, 3), value=-100))
    mask = torch.arange(longer[0].shape[1]).expand(len(tokens), -1) < tokens.shape[1]
    right, masked, unmasked = (model_of(name, **PADDED) for _ in range(3))
    losses = [right(tokens, labels), masked(*longer, token_mask=mask)]
    unmasked_loss = unmasked(*longer)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    assert not torch.isclose(unmasked_loss, losses[0], rtol=1e-4), "padding counts"
    for one, other in zip(right.parameters(), masked.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-12)
    for layer, routing in right.routings().items():
        found = masked.routings()[layer]
        assert torch.equal(found.counts_E, routing.counts_E)
        assert int(found.mask_T.sum()) == tokens.numel()


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


@pytest.mark.verifies("xtrain.model.decoder_parts:DecoderParts")
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
