"""Claims of the interview page of lc4, each run with and without its cause."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tensor_parallel.calls import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    collectives_of,
)
from tests.tensor_parallel.counted import bytes_of_step, saved_by, traffic_of_model
from tests.tensor_parallel.dense import close, fill, mine, random_of
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import TORCH
from xtrain.comm.work import Work
from xtrain.plan import activation_memory
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    HiddenParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    functions,
)
from xtrain.tensor_parallel.functions import column_linear

COLUMN = "xtrain.tensor_parallel.linear:ColumnParallelLinear"
ROW = "xtrain.tensor_parallel.linear:RowParallelLinear"
COLUMN_FUNCTION = "xtrain.tensor_parallel.functions:column_linear"
MODEL = "xtrain.model.decoder:XtrainModel"


@pytest.fixture(autouse=True)
def on_cpu(xtrain_worlds):
    """Skip elsewhere: bytes are those of our ring on CPUs."""
    if xtrain_worlds.device != "cpu":
        pytest.skip("bytes and kept tensors are counted on CPUs")


# ---------------------------------------------------- q49: why the column comes first


def functions_between(name: str) -> None:
    """Element by element on columns: exact. On partial sums: wrong, unless linear."""
    first, second = fill(nn.Linear(6, 12, bias=False)), fill(nn.Linear(12, 6), 2)
    function = getattr(torch, name) if hasattr(torch, name) else getattr(F, name)
    x = random_of(3, 4, 6)
    whole = second(function(first(x)))
    column, row = (
        ColumnParallelLinear.from_full(first),
        RowParallelLinear.from_full(second),
    )
    close(row(function(column(x))), whole)
    # The other way round: each rank has a partial sum, of which it takes the function.
    partial = F.linear(mine(x, -1), mine(first.weight, 1))
    summed = function(partial).detach().clone()
    dist.all_reduce(summed)
    right = function(first(x)).detach()
    assert torch.allclose(summed, right) == (name == "neg")


@pytest.mark.verifies(COLUMN, ROW)
def test_a_nonlinearity_works_on_columns_and_not_on_partial_sums(world):
    for name in ("tanh", "gelu", "neg"):  # the last one is linear
        world(2).run(functions_between, name)


def a_softmax_between() -> None:
    """Not element by element: it needs all columns."""
    first = fill(nn.Linear(6, 12, bias=False))
    x = random_of(3, 4, 6)
    here = ColumnParallelLinear.from_full(first)(x).softmax(-1)
    assert not torch.allclose(here, mine(first(x).softmax(-1), -1), rtol=0.1)


@pytest.mark.verifies(COLUMN)
def test_what_needs_all_columns_cannot_stand_between(world):
    world(2).run(a_softmax_between)


# -------------------------------------------------- q53: what either embedding sends


def bytes_of_embedding(kind) -> tuple[int, int]:
    layer = kind(12, HIDDEN)
    ids = torch.arange(SEQUENCE).view(BATCH, SEQUENCE)
    with collectives_of("ring"):
        with CommLedger() as forward:
            y = layer(ids)
        with CommLedger() as backward:
            y.sum().backward()
    return forward.bytes_sent, backward.bytes_sent


@pytest.mark.verifies(
    "xtrain.tensor_parallel.embedding:VocabParallelEmbedding",
    "xtrain.tensor_parallel.embedding:HiddenParallelEmbedding",
)
@pytest.mark.parametrize("size", [2, 3])
def test_by_vocabulary_sends_an_all_reduce_and_by_hidden_half_of_that(world, size):
    half = BATCH * SEQUENCE * HIDDEN * 4 * (size - 1) // size
    for kind, forward in ((VocabParallelEmbedding, 2), (HiddenParallelEmbedding, 1)):
        found = world(size).run(bytes_of_embedding, kind)
        assert found == [(forward * half, 0)] * size


# -------------------------------------------------------- q58: bytes of one layer


def bytes_of_layers(layers: int) -> list[int]:
    return traffic_of_model(layers, False, False, "ring")["sent"]


@pytest.mark.verifies(MODEL)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_layer_sends_8_b_s_h_elements_half_of_them_forward(world, size):
    one, two = (world(size).run(bytes_of_layers, layers) for layers in (1, 2))
    elements = BATCH * SEQUENCE * HIDDEN * (size - 1) // size
    for before, after in zip(one, two, strict=True):
        more = [b - a for a, b in zip(before, after, strict=True)]
        assert more == [4 * elements * 4, 4 * elements * 4]


# ------------------------------------ q57: what grows with tokens, and what with width


@pytest.mark.verifies(MODEL, "xtrain.zero.fsdp:FullyShardedDataParallel")
def test_tokens_double_the_one_and_width_the_other(world):
    sent = {
        kind: [max(world(2).run(bytes_of_step, kind, *size))
               for size in ((16, 12), (16, 24), (32, 12))]
        for kind in ("tensor parallelism", "ZeRO-3")
    }  # fmt: skip
    tensor, zero = sent.values()
    assert tensor[1:] == [2 * tensor[0]] * 2
    assert zero[1] == zero[0]
    assert 3.8 < zero[2] / zero[0] < 4


# ------------------------------------------------- q62: what a layer keeps for backward


class KeepMask(torch.autograd.Function):
    """A dropout that keeps one byte an element for backward, as GPUs' does."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) < 0.9
        ctx.save_for_backward(mask)
        return x * mask / 0.9

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] / 0.9


class GptLayer(nn.Module):
    """Attention with its scores kept, a GELU of four times the width, two dropouts."""

    def __init__(self, hidden: int, heads: int, sequence_parallel: bool):
        super().__init__()
        size = dist.get_world_size()
        options = {
            "bias": False,
            "sequence_parallel": sequence_parallel,
            "dtype": torch.bfloat16,
        }
        self.heads, self.scale = heads // size, (hidden // heads) ** -0.5
        self.norm1, self.norm2 = (
            nn.LayerNorm(hidden, dtype=torch.bfloat16) for _ in range(2)
        )
        self.q, self.k, self.v = (
            ColumnParallelLinear(hidden, hidden, **options) for _ in range(3)
        )
        self.o = RowParallelLinear(hidden, hidden, **options)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, **options)
        self.down = RowParallelLinear(4 * hidden, hidden, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + KeepMask.apply(self.o(self.attend(self.norm1(x))))
        inner = F.gelu(self.up(self.norm2(x)))
        return x + KeepMask.apply(self.down(inner))

    def attend(self, x: Tensor) -> Tensor:
        weights = [layer.weight for layer in (self.q, self.k, self.v)]
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in column_linear(x, weights, self.q.sequence_dim)
        )
        scores = (q * self.scale @ k.transpose(-1, -2)).softmax(-1)
        return (KeepMask.apply(scores) @ v).transpose(1, 2).flatten(2)


def kept_and_planned(sequence_parallel: bool) -> tuple[float, float]:
    """Bytes kept of a layer, without the norms' statistics; and the formula's."""
    size, batch, sequence, hidden, heads = dist.get_world_size(), 1, 32, 64, 4
    layer = GptLayer(hidden, heads, sequence_parallel)
    tokens = sequence // size if sequence_parallel else sequence
    x = torch.randn(batch, tokens, hidden).bfloat16().requires_grad_()
    found = saved_by(lambda: layer(x), layer)
    _, mean, deviation = torch.native_layer_norm(
        x, [hidden], layer.norm1.weight, layer.norm1.bias, 1e-5
    )
    found -= 2 * (mean.nbytes + deviation.nbytes)
    planned = activation_memory(sequence, batch, hidden, heads, size, sequence_parallel)
    return found, planned


@pytest.mark.verifies("xtrain.plan.activations:activation_memory")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_gpt_layer_keeps_the_bytes_of_the_formula(world, size):
    """34 s b h + 5 a s s b in one process; each of its parts on several."""
    for sequence_parallel in (False, True):
        for found, planned in world(size).run(kept_and_planned, sequence_parallel):
            assert found == planned


# ------------------------------------------------ q63: what the sum of dX runs beside


class Products(TorchDispatchMode):
    """Writes down the matrix products as they begin."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


def order_of_backward(overlap: bool) -> list[str]:
    """What a column layer's backward does, in order."""
    seen: list[str] = []

    class Watched(Work):
        def __init__(self, work: Work):
            self.work = work

        def wait(self) -> None:
            self.work.wait()
            seen.append("sum is there")

    def all_reduce(*args, **kwargs) -> Work:
        seen.append("sum begins")
        return Watched(TORCH.all_reduce(*args, **kwargs))

    functions.TORCH = replace(TORCH, all_reduce=all_reduce)
    try:
        x = torch.ones(2, 4, requires_grad=True)
        weight = torch.ones(3, 4, requires_grad=True)
        (y,) = column_linear(x, [weight], overlap=overlap)
        with Products(seen):
            y.sum().backward()
    finally:
        functions.TORCH = TORCH
    return seen


@pytest.mark.verifies(COLUMN_FUNCTION)
def test_the_sum_of_dx_travels_while_dw_is_computed(world):
    for found in world(2).run(order_of_backward, True):
        assert found == ["product", "sum begins", "product", "sum is there"]
    for found in world(2).run(order_of_backward, False):
        assert found[:4] == ["product", "sum begins", "sum is there", "product"]
