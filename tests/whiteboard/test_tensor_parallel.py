"""The whiteboard forms of lc4 pass the library forms' checks, inside their limits.

Every output and every gradient is compared with that of the whole module in float64, on
groups of 1 to 4 ranks and on a part of the ranks; what is cut is cut from its weights.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.tensor_parallel.dense import close, fill, mine, random_of, sub_group
from tests.tensor_parallel.test_blocks import config_of, heads_of
from tests.tensor_parallel.test_cross_entropy import cases
from xtrain.comm import CommLedger
from xtrain.copying.forms import forms, header
from xtrain.model.layer import Attention, SwiGLU
from xtrain.tensor_parallel.attention import key_replicas
from xtrain.tensor_parallel.rope import apply_rotary, rope_cos_sin
from xtrain.whiteboard.tensor_parallel.column_parallel_linear import (
    ColumnParallelLinear,
)
from xtrain.whiteboard.tensor_parallel.ring_all_gather_matmul import (
    ring_all_gather_matmul,
)
from xtrain.whiteboard.tensor_parallel.ring_matmul_reduce_scatter import (
    ring_matmul_reduce_scatter,
)
from xtrain.whiteboard.tensor_parallel.rotary_embedding import rotary_embedding
from xtrain.whiteboard.tensor_parallel.row_parallel_linear import RowParallelLinear
from xtrain.whiteboard.tensor_parallel.sequence_parallel_region import (
    SequenceParallelRegion,
)
from xtrain.whiteboard.tensor_parallel.tensor_parallel_attention import (
    TensorParallelAttention,
)
from xtrain.whiteboard.tensor_parallel.tensor_parallel_mlp import TensorParallelMLP
from xtrain.whiteboard.tensor_parallel.vocab_parallel_cross_entropy import (
    vocab_parallel_cross_entropy,
)
from xtrain.whiteboard.tensor_parallel.vocab_parallel_embedding import (
    VocabParallelEmbedding,
)

COLUMN = "xtrain.whiteboard.tensor_parallel.column_parallel_linear:ColumnParallelLinear"
ROW = "xtrain.whiteboard.tensor_parallel.row_parallel_linear:RowParallelLinear"
TABLE = (
    "xtrain.whiteboard.tensor_parallel.vocab_parallel_embedding:VocabParallelEmbedding"
)
LOSS = (
    "xtrain.whiteboard.tensor_parallel.vocab_parallel_cross_entropy"
    ":vocab_parallel_cross_entropy"
)
MLP = "xtrain.whiteboard.tensor_parallel.tensor_parallel_mlp:TensorParallelMLP"
HEADS = (
    "xtrain.whiteboard.tensor_parallel.tensor_parallel_attention"
    ":TensorParallelAttention"
)
REGION = (
    "xtrain.whiteboard.tensor_parallel.sequence_parallel_region:SequenceParallelRegion"
)
GATHER_MATMUL = (
    "xtrain.whiteboard.tensor_parallel.ring_all_gather_matmul:ring_all_gather_matmul"
)
MATMUL_SCATTER = (
    "xtrain.whiteboard.tensor_parallel.ring_matmul_reduce_scatter"
    ":ring_matmul_reduce_scatter"
)
ROTARY = "xtrain.whiteboard.tensor_parallel.rotary_embedding:rotary_embedding"

GROUPS = [None, [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 3]]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.04}
"""Of the largest value; the whole module gets the same rounded weights and inputs."""
ROWS_OF = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
INNER_OF = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


def on_every_group(case) -> None:
    """Run `case(group, size, dtype)` on all groups that this rank is in."""
    for members in GROUPS:
        group = sub_group(members) if members else None
        if members is None or group is not None:
            for dtype in TOLERANCE:
                case(group, dist.get_world_size(group), dtype)


def rounded(module: nn.Module, dtype) -> tuple[nn.Module, nn.Module]:
    """The module in `dtype`, and one in float64 with the same weights."""
    low = fill(module).to(dtype)
    return low, copy.deepcopy(low).double()


def near(actual, expected, dtype, what: str) -> None:
    assert actual.dtype == dtype, what
    assert actual.shape == expected.shape, what
    allowed = TOLERANCE[dtype] * max(1e-6, expected.abs().max().item())
    error = (actual.detach().double() - expected.detach()).abs().max().item()
    assert error <= allowed, f"{what}: {error} > {allowed} in {dtype}"


def leaves(x, split_dim=None, group=None):
    """The whole input in float64, and what a rank is given; both want gradients."""
    local = x if split_dim is None else mine(x, split_dim, group)
    return x.double().clone().requires_grad_(), local.clone().requires_grad_()


# --- linear layers --------------------------------------------------------------------


def ring_traffic() -> list[tuple[str, int, list[int]]]:
    """By form: bytes of the whole, and of each message that this rank sends."""
    size = dist.get_world_size()
    x, rows = torch.ones(2, 3, 8), [torch.ones(4, 8), torch.ones(5, 8)]
    wide, columns = torch.ones(2, 3 * size, 4), torch.ones(6, 4)
    found = []
    for name, call, nbytes in (
        ("ring_all_gather_matmul",
         lambda: ring_all_gather_matmul(x, rows, 1), size * x.nbytes),
        ("ring_matmul_reduce_scatter",
         lambda: ring_matmul_reduce_scatter(wide, columns, 1), 2 * 3 * size * 6 * 4),
    ):  # fmt: skip
        with CommLedger() as ledger:
            call()
        sent = [event for event in ledger.events if event.kind == "send"]
        assert {event.peer for event in sent} <= {(dist.get_rank() + 1) % size}
        found.append((name, nbytes, [event.payload for event in sent]))
    return found


@pytest.mark.verifies(GATHER_MATMUL, MATMUL_SCATTER)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ring_matmuls_send_what_the_headers_say(world, size):
    for found in world(size).run(ring_traffic):
        for name, nbytes, sent in found:
            words = header(forms()[name].read_text())["Sends"]
            assert words.startswith("(N-1)/N of the whole ")
            assert "in N-1 messages" in words
            assert sent == [nbytes // size] * (size - 1), name


# --- vocabulary -----------------------------------------------------------------------


def loss_case(group, size, dtype) -> None:
    for logits, labels in cases(size):
        logits = logits.to(dtype)
        whole, local = leaves(logits, -1, group)
        expected = F.cross_entropy(
            whole.flatten(0, 1), labels.flatten(), None, None, -7
        )
        expected.backward(torch.tensor(1.5).double())
        loss = vocab_parallel_cross_entropy(local, labels, -7, group=group)
        wide = torch.promote_types(dtype, torch.float32)
        near(loss, expected, wide, "loss")
        loss.backward(torch.tensor(1.5, dtype=wide))
        near(local.grad, mine(whole.grad, -1, group), dtype, "dX")
        assert torch.equal(local.detach(), mine(logits, -1, group)), "logits written"


@pytest.mark.verifies(LOSS)
def test_losses_and_gradients_are_torchs(world):
    world(4).run(on_every_group, loss_case)


def no_labels_and_default() -> None:
    logits = random_of(1, 3, 4).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.full((3,), -100))
    loss.backward()
    assert loss == 0 and logits.grad.count_nonzero() == 0


@pytest.mark.verifies(LOSS)
def test_without_labels_the_loss_is_zero(world):
    world(2).run(no_labels_and_default)


# --- blocks ---------------------------------------------------------------------------


def repeated(full, name: str, replicas: int):
    """A weight of key heads, each as often as it has replicas; others as they are."""
    if name not in ("k_proj", "v_proj"):
        return full
    return full.unflatten(0, (-1, 4)).repeat_interleave(replicas, 0).flatten(0, 1)


def attention_case(group, size, dtype) -> None:
    for heads, key_heads in heads_of(size):
        config = config_of(heads, key_heads, size)
        low, dense = rounded(Attention(config), dtype)
        layer = TensorParallelAttention(low, group, head_dim=4)
        positions = torch.arange(3 * size + 1) * 7
        angles = rope_cos_sin(
            positions, 4, 10_000.0, config.rope_scaling, torch.float64
        )
        x = random_of(6, 2, 3 * size + 1, 6, dtype=dtype)
        grad = random_of(7, *x.shape, dtype=dtype)
        whole, local = leaves(x)
        y = dense(whole, positions)
        out = layer(local, lambda t, angles=angles: apply_rotary(t, *angles))
        y.backward(grad.double())
        out.backward(grad)
        near(out, y, dtype, "y")
        near(local.grad, whole.grad, dtype, "dX")
        replicas = key_replicas(key_heads, size)
        for name, dim in ROWS_OF.items():
            full = repeated(dense.get_submodule(name).weight.grad, name, replicas)
            part = mine(full, dim, group)
            near(layer.get_parameter(name).grad, part, dtype, f"{name} {key_heads}")


@pytest.mark.verifies(HEADS)
def test_attention_is_that_of_one_device_for_any_number_of_key_heads(world):
    world(4).run(on_every_group, attention_case)


@pytest.mark.verifies(ROTARY)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary_positions_are_the_librarys(dtype):
    for shape in ((5,), (2, 5)):  # the same for the batch, or each its own
        positions = (random_of(2, *shape).abs() * 40_000).long()
        x = random_of(1, 2, 3, 5, 8, dtype=dtype)
        for theta in (10_000.0, 500_000.0):
            wide = torch.promote_types(dtype, torch.float32)
            cos, sin = rope_cos_sin(positions, 8, theta, None, wide)
            turned = rotary_embedding(x, positions, theta)
            right, last = apply_rotary(x, cos, sin), 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(turned, right, rtol=last, atol=last)
            if dtype == torch.float64:  # pairs as complex numbers
                frequencies = theta ** (-torch.arange(4).double() / 4)
                angles = positions[..., None, :, None] * frequencies
                unit = torch.polar(torch.ones_like(angles), angles)
                pairs = torch.complex(*turned.chunk(2, -1))
                exact = torch.complex(*x.chunk(2, -1)) * unit
                torch.testing.assert_close(pairs, exact, rtol=0, atol=1e-9)


# --- together -------------------------------------------------------------------------


class Whole(nn.Module):
    def __init__(self, size: int, key_heads: int):
        super().__init__()
        config = replace(config_of(2 * size, key_heads, 3 * size), rope_scaling=None)
        self.table, self.attention = nn.Embedding(4 * size, 6), Attention(config)
        self.mlp, self.head = SwiGLU(config), nn.Linear(6, 4 * size, bias=False)

    def forward(self, ids, labels, positions):
        x = self.table(ids)
        x = x + self.attention(x, positions)
        x = x + self.mlp(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Cut(nn.Module):
    def __init__(self, whole: Whole):
        super().__init__()
        self.table = VocabParallelEmbedding(whole.table)
        self.attention = TensorParallelAttention(whole.attention, head_dim=4)
        self.mlp, self.head = (
            TensorParallelMLP(whole.mlp),
            ColumnParallelLinear(whole.head),
        )

    def forward(self, ids, labels, positions):
        x = self.table(ids)
        x = x + self.attention(x, lambda t: rotary_embedding(t, positions))
        x = x + self.mlp(x)
        return vocab_parallel_cross_entropy(self.head(x), labels)


def train(key_heads: int) -> None:
    size = dist.get_world_size()
    whole = fill(Whole(size, key_heads))
    cut = Cut(whole)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, cut)]
    for step in range(4):
        ids, labels = (
            (random_of(seed + step, 3, 5) * 99).long() % (4 * size) for seed in (20, 40)
        )
        labels[0, :3] = -100
        losses = []
        for model, optimizer in zip((whole, cut), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(ids, labels, torch.arange(5)))
            losses[-1].backward()
            optimizer.step()
        close(losses[1].detach(), losses[0].detach(), f"loss of step {step}")
    replicas = key_replicas(key_heads, size)
    for name, parameter in cut.named_parameters():
        last = name.rpartition(".")[2]
        dim = (ROWS_OF | INNER_OF).get(last, 0)
        full = whole.get_parameter(name if last == "weight" else f"{name}.weight")
        torch.testing.assert_close(
            parameter, mine(repeated(full, last, replicas), dim), rtol=1e-9, atol=1e-9
        )


@pytest.mark.verifies(COLUMN, TABLE, LOSS, MLP, HEADS, ROTARY)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_several_steps_of_a_model_of_forms_are_those_of_one_device(world, size):
    for key_heads in {1, size, 2 if size == 4 else 1}:
        world(size).run(train, key_heads)


def second_derivatives() -> None:
    """Of the sum of squares of dX: right where f and g are each other's backward."""
    size = dist.get_world_size()
    dense = fill(SwiGLU(config_of(4, 2, 5 * size)))
    x = random_of(5, 2, 3, 6)
    grads = []
    for module in (dense, TensorParallelMLP(dense)):
        here = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            module(here).square().sum(), here, create_graph=True
        )
        grad.square().sum().backward()
        grads.append(here.grad)
    close(grads[1], grads[0], "second derivative")
    for layer, features in ((ColumnParallelLinear, 4), (RowParallelLinear, 4 // size)):
        here = torch.ones(2, features, requires_grad=True)
        y = layer(nn.Linear(4, 4))(here).square().sum()
        (grad,) = torch.autograd.grad(y, here, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.verifies(MLP, COLUMN, ROW)
def test_second_derivatives_are_right_or_refused(world):
    world(2).run(second_derivatives)


# --- what they send -------------------------------------------------------------------


def collectives() -> list[str]:
    """Of the blocks: what torch is asked for, forward and backward together."""
    x = torch.ones(2, 12, 6, requires_grad=True)
    slices = torch.ones(2, 6, 6, requires_grad=True)
    mlp = TensorParallelMLP(SwiGLU(config_of(12, 12, 12)))
    heads = TensorParallelAttention(Attention(config_of(12, 12, 12)), head_dim=4)
    region = SequenceParallelRegion(nn.Identity(), nn.Identity())
    asked = []
    for forward in (lambda: mlp(x), lambda: heads(x), lambda: region(slices)):
        with CommLedger() as ledger:
            forward().sum().backward()
        asked.append([event.op for event in ledger.events])
    return asked


@pytest.mark.verifies(MLP, HEADS, REGION)
def test_a_block_is_two_all_reduces_or_their_halves(world):
    halves = ["_allgather_base", "_reduce_scatter_base"]
    for asked in world(2).run(collectives):
        assert asked == [["allreduce"] * 2, ["allreduce"] * 2, halves * 2]
