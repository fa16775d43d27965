"""Cut layers under `torch.autocast`: 16-bit matmuls and messages, fp32 gradients."""

import pytest
import torch

from tests.devices import device_type, randint
from tests.tensor_parallel.dense import our_collectives
from xtrain.comm import CommLedger, init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.tensor_parallel import ColumnParallelLinear, RowParallelLinear

AUTOCAST = "xtrain.tensor_parallel.autocast:as_autocast"
CONFIG = XtrainConfig(
    vocab_size=24, hidden_size=12, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=12, num_key_value_heads=4, head_dim=4, initializer_range=0.3,
)  # fmt: skip


def gradients_of(model, tokens, labels, dtype):
    with torch.autocast(device_type(), dtype, enabled=dtype is not None):
        loss = model(tokens, labels)
    loss.backward()
    model.sync_gradients()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def under_autocast(size):
    """Each layout's error against exact fp32, beside the whole model's own error."""
    mesh = init_mesh((size,), ("tensor",))
    generator = torch.Generator().manual_seed(5)
    tokens, labels = randint(24, (2, 3, 12), generator)
    exact_loss, exact = gradients_of(XtrainModel(CONFIG), tokens, labels, None)
    whole_loss, whole = gradients_of(
        XtrainModel(CONFIG), tokens, labels, torch.bfloat16
    )
    found = []
    for sequence_parallel in (False, True):
        model = XtrainModel(CONFIG, mesh, sequence_parallel=sequence_parallel)
        loss, gradients = gradients_of(model, tokens, labels, torch.bfloat16)
        worst = 0.0
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32, name
            right = model.placement(name).of(exact[name])
            own = (model.placement(name).of(whole[name]) - right).norm() / right.norm()
            error = (gradient - right).norm() / right.norm()
            worst = max(worst, (error / own.clamp(min=1e-3)).item())
        found.append((abs(loss - exact_loss), abs(whole_loss - exact_loss), worst))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.verifies(AUTOCAST)
def test_a_cut_model_under_autocast_is_as_near_to_fp32_as_a_whole_one(world, size):
    for results in world(size).run(under_autocast, size):
        for loss, whole, worst in results:
            assert 0 < whole < 0.02, "the whole model computes in 16 bits"
            assert 0 < loss < 0.02
            assert worst < 3


@our_collectives()
def what_is_sent(overlap):
    column = ColumnParallelLinear(8, 12, overlap=overlap, sequence_parallel=True)
    row = RowParallelLinear(12, 8, overlap=overlap, sequence_parallel=True)
    x = torch.randn(2, 3, 8, requires_grad=True)
    with CommLedger() as ledger, torch.autocast(device_type(), torch.bfloat16):
        y = row(column(x))
    ledger_bytes = ledger.bytes_sent
    y.float().sum().backward()
    return y.dtype, x.grad.dtype, column.weight.grad.dtype, ledger_bytes


@pytest.mark.parametrize("overlap", [True, "ring"])
def test_messages_are_in_16_bits_and_gradients_in_32(world, overlap):
    for y, dx, dw, sent in world(2).run(what_is_sent, overlap):
        assert (y, dx, dw) == (torch.bfloat16, torch.float32, torch.float32)
        assert sent == 2 * (2 * 3 * 8) * 2, "x gathered, y scattered, 2 bytes each"


def refusal(dtype):
    layer = ColumnParallelLinear(8, 12)
    with torch.autocast(device_type(), dtype), CommLedger() as ledger:
        try:
            layer(torch.randn(2, 8))
        except ValueError as error:
            return str(error), ledger.bytes_sent
    return None


def test_autocast_to_float16_is_refused_on_every_rank_before_any_message(world):
    for words, sent in world(2).run(refusal, torch.float16):
        assert "GradScaler that asks all tensor ranks" in words
        assert sent == 0
    assert world(2).run(refusal, torch.bfloat16) == [None, None]


def without_gradients():
    """Both halves of an MLP under autocast to float16, and what they should give."""
    torch.manual_seed(0)
    x, first, second = torch.randn(2, 8), torch.randn(12, 8), torch.randn(8, 12)
    column = ColumnParallelLinear.from_full(first)
    row = RowParallelLinear.from_full(second)
    with torch.no_grad(), torch.autocast(device_type(), torch.float16):
        y = row(column(x))
    return y.dtype, (y.float() - x @ first.T @ second.T).abs().max().item()


def test_without_gradients_autocast_to_float16_computes(world):
    """Nothing is scaled where there are no gradients, so nothing is refused."""
    for dtype, error in world(2).run(without_gradients):
        assert dtype == torch.float16
        assert 0 < error < 0.1
