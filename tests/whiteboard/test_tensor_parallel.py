"""What the self-checks of lc4's whiteboard forms leave to the suite.

A model made of them, positions as the library turns them, second derivatives, and what
they send by which collective.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.tensor_parallel.dense import close, fill, mine, random_of
from tests.tensor_parallel.test_blocks import config_of
from tests.whiteboard.ring_instead import ring_instead
from xtrain.comm import CommLedger
from xtrain.copying.forms import forms, header
from xtrain.model.attention import Attention
from xtrain.model.mlp import SwiGLU
from xtrain.tensor_parallel.attention import key_replicas
from xtrain.tensor_parallel.rope import apply_rotary, rope_cos_sin
from xtrain.whiteboard.tensor_parallel import column_parallel_linear as column_file
from xtrain.whiteboard.tensor_parallel import row_parallel_linear as row_file
from xtrain.whiteboard.tensor_parallel import sequence_parallel_region as region_file
from xtrain.whiteboard.tensor_parallel import tensor_parallel_attention as heads_file
from xtrain.whiteboard.tensor_parallel import tensor_parallel_mlp as mlp_file
from xtrain.whiteboard.tensor_parallel import vocab_parallel_cross_entropy as loss_file
from xtrain.whiteboard.tensor_parallel import vocab_parallel_embedding as table_file
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

ROWS_OF = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
INNER_OF = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


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


def repeated(full, name: str, replicas: int):
    """A weight of key heads, each as often as it has replicas; others as they are."""
    if name not in ("k_proj", "v_proj"):
        return full
    return full.unflatten(0, (-1, 4)).repeat_interleave(replicas, 0).flatten(0, 1)


@pytest.mark.verifies(ROTARY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotary_positions_are_the_librarys(dtype):
    for shape in ((5,), (2, 5)):  # the same for the batch, or each its own
        positions = (random_of(2, *shape).abs() * 40_000).long()
        x = random_of(1, 2, 3, 5, 8, dtype=dtype)
        for theta in (10_000.0, 500_000.0):
            wide = torch.promote_types(dtype, torch.float32)
            cos, sin = rope_cos_sin(positions, 8, theta, None, wide)
            turned = rotary_embedding(x, positions, theta)
            assert torch.equal(turned, apply_rotary(x, cos, sin))


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


def counted(file, forward) -> tuple[int, int]:
    """Bytes that this rank sends forward and backward, all collectives as rings."""
    with CommLedger() as ahead, ring_instead(file):
        y = forward()
    with CommLedger() as back, ring_instead(file):
        y.backward(torch.ones_like(y))
    return ahead.bytes_sent, back.bytes_sent


def traffic():
    """By form: bytes counted forward and backward, and of what these are 2(N-1)/N."""
    size = dist.get_world_size()
    x, whole = torch.ones(2, 12, 6, requires_grad=True), 2 * 12 * 6 * 4
    part = torch.ones(2, 12, 2, requires_grad=True)
    logits = torch.ones(2, 12, 5, requires_grad=True)
    labels = torch.arange(24).view(2, 12) % 5
    slices = torch.ones(2, 12 // size, 6, requires_grad=True)
    column = ColumnParallelLinear(nn.Linear(6, 12))
    row = RowParallelLinear(nn.Linear(2 * size, 6))
    table = VocabParallelEmbedding(nn.Embedding(12, 6))
    mlp = TensorParallelMLP(SwiGLU(config_of(12, 12, 12)))
    many = TensorParallelAttention(Attention(config_of(12, 12, 12)), head_dim=4)
    few = TensorParallelAttention(Attention(config_of(12, 1, 12)), head_dim=4)
    one_head = 2 * 4 * 6 * 4 if size > 1 else 0  # dW_k and dW_v
    region = SequenceParallelRegion(nn.RMSNorm(6), nn.Identity())
    return [
        ("column_parallel_linear", counted(column_file, lambda: column(x)), (0, whole)),
        ("row_parallel_linear", counted(row_file, lambda: row(part)), (whole, 0)),
        (
            "vocab_parallel_embedding",
            counted(table_file, lambda: table(labels)),
            (whole, 0),
        ),
        (
            "vocab_parallel_cross_entropy",
            counted(loss_file, lambda: vocab_parallel_cross_entropy(logits, labels)),
            (3 * 24 * 4, 0),
        ),
        ("tensor_parallel_mlp", counted(mlp_file, lambda: mlp(x)), (whole, whole)),
        (
            "tensor_parallel_attention",
            counted(heads_file, lambda: many(x)),
            (whole, whole),
        ),
        (
            "tensor_parallel_attention",
            counted(heads_file, lambda: few(x)),
            (whole, whole + one_head),
        ),
        (
            "sequence_parallel_region",
            counted(region_file, lambda: region(slices)),
            (whole, whole + 6 * 4),
        ),
    ]


SAID = {
    "column_parallel_linear": "nothing forward; backward 2(N-1)/N of x",
    "row_parallel_linear": "forward 2(N-1)/N of y",
    "vocab_parallel_embedding": "forward 2(N-1)/N of y",
    "vocab_parallel_cross_entropy": "forward 2(N-1)/N of three numbers a token",
    "tensor_parallel_mlp": "forward 2(N-1)/N of y, for g; backward 2(N-1)/N of x",
    "tensor_parallel_attention": "2(N-1)/N of y forward, of x backward, and of dW_k",
    "sequence_parallel_region": "2(N-1)/N of the whole x forward; backward too, and",
}


@pytest.mark.verifies(COLUMN, ROW, TABLE, LOSS, MLP, HEADS, REGION)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_ranks_send_what_the_headers_say(world, size):
    ranks = world(size).run(traffic)
    assert {name for name, _, _ in ranks[0]} == SAID.keys()
    for cases_of_ranks in zip(*ranks, strict=True):
        name, _, nbytes = cases_of_ranks[0]
        assert header(forms()[name].read_text())["Sends"].startswith(SAID[name])
        for phase in (0, 1):
            sent = sum(counts[phase] for _, counts, _ in cases_of_ranks)
            assert sent == 2 * (size - 1) * nbytes[phase], (name, phase)


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
