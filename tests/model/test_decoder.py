"""The decoder against plain maths in float64: outputs, losses, gradients, steps."""

import pytest
import torch
import torch.nn.functional as F

from tests.model import reference
from tests.model.configs import CONFIGS, EXPERTS, VOCABULARY, config_of
from xtrain.model import XtrainModel
from xtrain.model.loss import mean_cross_entropy

PARTS = (
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.layer:DecoderLayer",
    "xtrain.model.layer:Attention",
    "xtrain.model.layer:SwiGLU",
    "xtrain.model.moe:make_moe",
    "xtrain.tensor_parallel.rope:rope_cos_sin",
    "xtrain.tensor_parallel.rope:apply_rotary",
)
POSITIONS = {
    "counted": None,
    "given": torch.tensor([3, 0, 7, 100, 5]),
    "of each row": torch.tensor([[0, 1, 2, 3, 4], [40, 41, 90, 91, 92]]),
}


def model_of(name, dtype=torch.float64, **changes):
    """A model whose norms are no ones, so that they show."""
    model = XtrainModel(config_of(name, **changes), dtype=dtype)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def batch(seed=0, ignored=3):
    """Tokens and labels, [2, 5]; some labels are -100."""
    torch.manual_seed(seed)
    tokens, labels = torch.randint(VOCABULARY, (2, 2, 5))
    labels.flatten()[torch.randperm(10)[:ignored]] = -100
    return tokens, labels


def copies(model):
    """The weights by name, as leaves of their own."""
    return {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.verifies(*PARTS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", [*CONFIGS, *EXPERTS])
def test_logits_loss_and_every_gradient_equal_the_reference(name, positions):
    model, (tokens, labels) = model_of(name), batch()
    weights, places = copies(model), POSITIONS[positions]
    expected = reference.logits_of(weights, model.config, tokens, places)
    torch.testing.assert_close(model(tokens, positions=places), expected)
    loss = model(tokens, labels, places)
    right = reference.loss_of(expected, labels)
    torch.testing.assert_close(loss, right)
    loss.backward()
    right.backward()
    for name, parameter in model.named_parameters():
        assert weights[name].grad.abs().max() > 1e-6, name  # it says something
        torch.testing.assert_close(parameter.grad, weights[name].grad, msg=name)


@pytest.mark.verifies(
    *PARTS,
    "xtrain.tensor_parallel.attention_mask:attention_mask",
    "xtrain.tensor_parallel.attention_mask:scaled_dot_product_attention",
)
@pytest.mark.parametrize("name", ["four for one", "window", "Mixtral"])
def test_packed_documents_equal_the_reference(name):
    """A document is as it is alone, at its positions; padding sees nothing."""
    model, (tokens, labels) = model_of(name), batch()
    documents = torch.tensor([[4, 4, 2, 2, 2], [7, 7, 7, 7, -1]])
    weights = copies(model)
    expected = reference.logits_of(weights, model.config, tokens, None, documents)
    found = model(tokens, documents=documents)
    torch.testing.assert_close(found, expected)
    alone = model(tokens[:1, 2:], positions=torch.arange(2, 5))
    torch.testing.assert_close(found[:1, 2:], alone)
    loss = model(tokens, labels, documents=documents)
    right = reference.loss_of(expected, labels)
    torch.testing.assert_close(loss, right)
    loss.backward()
    right.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, msg=name)
    for wrong in (documents[:, :4], documents.double()):
        with pytest.raises(ValueError, match="documents of shape"):
            model(tokens, documents=wrong)


@pytest.mark.verifies("xtrain.model.decoder_parts:DecoderParts")
def test_rows_that_pad_the_vocabulary_change_nothing():
    """Same first values, logits, loss, gradients and steps; the rows stay zero."""
    bare, padded = (
        XtrainModel(
            config_of("two for one", padded_vocab_size=rows), dtype=torch.double
        )
        for rows in (None, 16)
    )
    for step in range(3):
        tokens, labels = batch(step)
        logits = padded(tokens)
        assert logits[..., VOCABULARY:].max() == float("-inf")
        torch.testing.assert_close(padded(tokens, gather_logits=True), bare(tokens))
        for model in (bare, padded):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.zero_grad()
            model.loss(tokens, labels).backward()
            optimizer.step()
    for name, parameter in padded.named_parameters():
        right = bare.get_parameter(name)
        torch.testing.assert_close(parameter[: len(right)], right)
        assert not parameter[len(right) :].any()
    with pytest.raises(ValueError, match="padded_vocab_size=5"):
        config_of("tied", padded_vocab_size=5)


@pytest.mark.verifies(*PARTS)
@pytest.mark.parametrize("name", ["four for one", "tied", "DeepSeek"])
def test_training_steps_equal_the_reference(name):
    """AdamW: six batches, other labels ignored in each."""
    model = model_of(name)
    weights = copies(model)
    ours = torch.optim.AdamW(model.parameters(), lr=0.05)
    right = torch.optim.AdamW(weights.values(), lr=0.05)
    for step in range(6):
        tokens, labels = batch(step, ignored=step)
        logits = reference.logits_of(weights, model.config, tokens, None)
        for optimizer, loss in (
            (ours, model.loss(tokens, labels)),
            (right, reference.loss_of(logits, labels)),
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], msg=name)


@pytest.mark.verifies("xtrain.model.decoder:XtrainModel")
def test_the_gradient_of_a_tied_table_is_the_sum_of_both_uses():
    tied, (tokens, labels) = model_of("tied"), batch()
    assert tied.lm_head.weight is tied.embed_tokens.weight
    loose = XtrainModel(
        config_of("tied", tie_word_embeddings=False), dtype=torch.float64
    )
    loose.load_state_dict(tied.state_dict())
    for model in (tied, loose):
        model.loss(tokens, labels).backward()
    uses = loose.embed_tokens.weight.grad, loose.lm_head.weight.grad
    assert min(use.abs().max() for use in uses) > 1e-3
    torch.testing.assert_close(tied.embed_tokens.weight.grad, sum(uses))


@pytest.mark.verifies("xtrain.model.loss:mean_cross_entropy")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_any_valid_label_the_loss_is_zero_and_so_are_all_gradients(dtype):
    model, (tokens, labels) = model_of("two for one", dtype), batch(ignored=10)
    loss = model.loss(tokens, labels)
    loss.backward()
    assert loss.item() == 0
    assert all(torch.all(p.grad == 0) for p in model.parameters())


@pytest.mark.verifies("xtrain.model.loss:mean_cross_entropy")
def test_the_sum_is_divided_once_by_the_count_of_all_rows():
    """A mean of the rows' means would weigh the token of the short row four times."""
    model, (tokens, labels) = model_of("two for one"), batch(ignored=0)
    labels[1, 1:] = -100
    rows = [model.loss(tokens[[row]], labels[[row]]) for row in (0, 1)]
    whole = model.loss(tokens, labels)
    torch.testing.assert_close(whole, (5 * rows[0] + rows[1]) / 6)
    assert abs(whole - sum(rows) / 2) > 1e-2


@pytest.mark.verifies("xtrain.model.loss:mean_cross_entropy")
def test_16_bit_logits_are_summed_in_fp32():
    """2000 losses of 16 bits each do not fit a bfloat16 sum."""
    torch.manual_seed(0)
    logits = torch.randn(1, 2000, 13).bfloat16()
    labels = torch.randint(13, (1, 2000))
    found = mean_cross_entropy(logits, labels)
    assert found.dtype == torch.float32
    expected = F.cross_entropy(logits[0].double(), labels[0])
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.verifies("xtrain.model.layer:Attention")
def test_no_token_sees_a_later_one():
    model, (tokens, _) = model_of("four for one"), batch()
    before = model(tokens)
    tokens[:, 3] = (tokens[:, 3] + 1) % VOCABULARY
    after = model(tokens)
    torch.testing.assert_close(after[:, :3], before[:, :3], atol=0, rtol=0)
    assert (after[:, 3:] - before[:, 3:]).abs().amin(dim=(0, 2)).min() > 0


@pytest.mark.verifies("xtrain.model.layer:Attention")
def test_the_attention_that_is_handed_in_is_the_one_that_runs():
    """Called as torch's is: what ring attention will stand in for."""
    calls = []

    def watched(q, k, v, *, is_causal, enable_gqa):
        calls.append((q.shape, k.shape, v.shape, is_causal, enable_gqa))
        return 2 * F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=enable_gqa
        )

    plain, (tokens, _) = model_of("four for one"), batch()
    model = XtrainModel(plain.config, attention=watched, dtype=torch.float64)
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.o_proj.weight /= 2
    torch.testing.assert_close(model(tokens), plain(tokens))
    assert calls == [((2, 8, 5, 6), (2, 2, 5, 6), (2, 2, 5, 6), True, True)] * 2


@pytest.mark.verifies("xtrain.model.decoder:XtrainModel")
@pytest.mark.parametrize("name", ["two for one", "tied"])
def test_in_16_bits_the_logits_are_near_the_exact_ones(name):
    """At large positions, too: angles are not rounded to 16 bits."""
    tokens, _ = batch()
    places = torch.arange(5) + 4000
    low = model_of(name, torch.bfloat16)
    exact = model_of(name)
    exact.load_state_dict(low.state_dict())
    wanted = exact(tokens, positions=places)
    error = (low(tokens, positions=places) - wanted).abs().max()
    assert error < 0.05 * wanted.abs().max()


def test_loss_is_the_call_so_that_hooks_run():
    model, (tokens, labels) = model_of("one head"), batch()
    seen = []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    torch.testing.assert_close(model.loss(tokens, labels), model(tokens, labels))
    assert seen == ["forward", "forward"]
