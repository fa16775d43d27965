"""Cross-entropy of split logits against torch's of whole ones."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.devices import on_cpu
from tests.tensor_parallel.dense import ON_GROUPS, mine, on_group, random_of
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger
from xtrain.comm.autograd import all_gather_split
from xtrain.tensor_parallel import vocab_parallel_cross_entropy
from xtrain.testing.saved import SavedTensors, address

SYMBOL = "xtrain.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
FUNCTION = "xtrain.tensor_parallel.cross_entropy:_CrossEntropy"


def reference(logits, labels, ignored, smoothing, z_loss, reduction):
    """torch's loss of each token, the z-loss added, reduced by hand."""
    flat, targets = logits.flatten(0, -2), labels.flatten()
    losses = F.cross_entropy(
        flat, targets, ignore_index=ignored, label_smoothing=smoothing, reduction="none"
    )
    valid = targets != ignored
    losses = losses + z_loss * torch.logsumexp(flat, -1) ** 2 * valid
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / valid.sum().clamp(min=1)


def cases(size: int):
    """Labels all over, in one shard only, and ignored; logits small and huge."""
    for scale, where in itertools.product((1.0, 60.0), ("all", "one shard", "ignored")):
        logits = random_of(3, 2, 5, 4 * size) * scale
        labels = (random_of(4, 2, 5) * 100).long() % (4 * size)
        if where == "one shard":
            labels = labels % 4
        if where == "ignored":
            labels[0, 1:] = labels[1, 0] = -7
        yield logits, labels


def against_torch(group) -> None:
    size = dist.get_world_size(group)
    options = itertools.product((0.0, 0.1), (0.0, 1e-2), ("mean", "sum", "none"))
    for (logits, labels), chosen in itertools.product(cases(size), list(options)):
        whole = logits.clone().requires_grad_()
        expected = reference(whole, labels, -7, *chosen)
        upstream = (
            random_of(8, 2, 5).view_as(expected)
            if expected.dim()
            else random_of(8, 1)[0]
        )
        expected.backward(upstream)
        local = mine(logits, -1, group).clone().requires_grad_()
        before = local.detach().clone()
        loss = vocab_parallel_cross_entropy(local, labels, -7, *chosen, group=group)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        loss.backward(upstream)
        assert torch.equal(local.detach(), before), "the logits were written"
        torch.testing.assert_close(
            local.grad, mine(whole.grad, -1, group), rtol=1e-11, atol=1e-12
        )


@pytest.mark.verifies(SYMBOL, FUNCTION)
@ON_GROUPS
def test_losses_and_gradients_are_torchs(world, size, members):
    world(size).run(on_group, members, against_torch)


def in_16_bits() -> None:
    """Sums in fp32: near to float64, where sums in bf16 are not."""
    size = dist.get_world_size()
    logits = (random_of(3, 64, 500 * size) * 4).bfloat16()
    labels = (random_of(4, 64) * 1000).long() % (500 * size)
    exact = F.cross_entropy(logits.double(), labels)
    local = mine(logits, -1).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, labels)
    loss.backward()
    assert loss.dtype == torch.float32 and local.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    assert (F.cross_entropy(logits, labels).double() - exact).abs() > 1e-4


@pytest.mark.verifies(SYMBOL)
def test_16_bit_logits_are_summed_in_fp32(world):
    world(2).run(in_16_bits)


def without_labels_and_twice() -> None:
    logits = random_of(1, 3, 4).requires_grad_()
    ignored = torch.full((3,), -100)
    loss = vocab_parallel_cross_entropy(logits, ignored)
    loss.backward()
    assert loss == 0 and logits.grad.count_nonzero() == 0
    loss = vocab_parallel_cross_entropy(logits, torch.zeros(3, dtype=torch.long))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once only"):
        loss.backward()
    loss = vocab_parallel_cross_entropy(logits, torch.arange(3))
    # once_differentiable would accept it, because a loss has the constant gradient 1.
    with pytest.raises(RuntimeError, match="create_graph=True: .* no second deriv"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.verifies(SYMBOL)
def test_without_labels_it_is_zero_and_it_goes_backward_once(world):
    world(2).run(without_labels_and_twice)


def messages() -> tuple[int, int]:
    """Elements handed to all-reduce, forward and backward."""
    counted: list[int] = []
    original = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        counted.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    with replaced(dist, "all_reduce", counting):
        logits = random_of(1, 6, 100).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, torch.arange(6))
        forward = list(counted)
        with CommLedger() as ledger:
            loss.backward()
        assert counted == forward and ledger.bytes_sent == 0, "backward sent something"
    return tuple(forward)


@pytest.mark.verifies(SYMBOL)
def test_three_numbers_a_token_travel_and_backward_sends_nothing(world):
    assert world(2).run(messages) == [(6, 12)] * 2


def kept_for_backward() -> None:
    """In fp32: the probabilities, 14 bytes a token, and how many labels count.

    torch's loss of gathered logits: those of all columns, the labels and a sum.
    """
    tokens, columns, size = 96, 40, dist.get_world_size()
    labels = torch.arange(tokens) % (columns * size)
    logits = torch.randn(tokens, columns, requires_grad=True) * 1.0  # not a leaf
    gradients: list[torch.Tensor] = []
    logits.register_hook(gradients.append)
    with SavedTensors() as saved:
        loss = vocab_parallel_cross_entropy(logits, labels)
    loss.backward()
    if on_cpu():
        assert saved.nbytes() == 4 * tokens * columns + (8 + 1 + 1 + 4) * tokens + 8
    assert address(gradients[0]) in saved.storages
    with SavedTensors() as saved:
        F.cross_entropy(all_gather_split(logits.detach().requires_grad_(), -1), labels)
    if on_cpu():
        assert saved.nbytes() == 4 * tokens * columns * size + 8 * tokens + 4


@pytest.mark.verifies(SYMBOL, FUNCTION)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_keeps_its_columns_and_the_gradient_lies_in_them(world, size):
    world(size).run(kept_for_backward)


def refusals() -> None:
    logits, labels = torch.ones(3, 4), torch.zeros(3, dtype=torch.long)
    cases: dict[str, tuple] = {
        "do not fit logits": (logits, labels[:2]),
        "labels NoneType do not fit": (logits, None),
        "fit logits list": ([[1.0]], labels),
        "not floating-point": (logits.long(), labels),
        "reduction='avg'": (logits, labels, -100, 0.0, 0.0, "avg"),
        "label_smoothing=2": (logits, labels, -100, 2.0),
        "z_loss=-1": (logits, labels, -100, 0.0, -1.0),
    }
    if on_cpu():
        cases["are outside the vocabulary of 8"] = logits, labels + 8
    for message, arguments in cases.items():
        with pytest.raises(ValueError, match=message):
            vocab_parallel_cross_entropy(*arguments)


@pytest.mark.verifies(SYMBOL)
def test_bad_input_is_refused_on_all_ranks(world):
    world(2).run(refusals)
