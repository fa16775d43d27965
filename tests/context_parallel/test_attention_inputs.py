"""What attention over cut sequences takes: shapes, dtypes, strides, groups, modes."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.context_parallel.attention_cases import dense, errors_of, qkv
from tests.devices import device_type, randn
from xtrain.comm import CommLedger
from xtrain.context_parallel import (
    all_gather_attention,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from xtrain.context_parallel.block_attention import FUSED_CUDA, TILES

RING = "xtrain.context_parallel.ring_attention:ring_attention"
GATHERED = "xtrain.context_parallel.all_gather_attention:all_gather_attention"
ULYSSES = "xtrain.context_parallel.ulysses:ulysses_attention"
CAST = "xtrain.comm.autocast:cast_by_autocast"
ALL = (ring_attention, all_gather_attention, ulysses_attention)
NAMES = ("ring", "all_gather", "ulysses")


def error_of(ours, expected, balance="none") -> float:
    """The largest error of parts of a sequence, together."""
    return max(
        (unshard_sequence(a, 2, balance) - b).abs().max().item()
        for a, b in zip(ours, expected, strict=True)
    )


def cross_attention(queries: int, keys: int) -> list[list[float]]:
    size = dist.get_world_size()
    q, _, _, grad = qkv(2 * size, 2, queries * size)
    _, k, v, _ = qkv(2 * size, 2, keys * size, seed=3)
    return [errors_of(name, (q, k, v, grad), causal=False) for name in NAMES]


@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (4, 1)])
@pytest.mark.verifies(RING, GATHERED, ULYSSES)
def test_cross_attention_with_more_or_fewer_keys_than_queries(world, queries, keys):
    for found in world(3).run(cross_attention, queries, keys):
        assert max(map(max, found)) < 1e-12


def head_dims_and_strides() -> list[float]:
    """Inputs with gaps in every dim, and a gradient that is one number."""
    found = []
    for head_dim in (1, 5, 33):
        generator = torch.Generator().manual_seed(1)
        whole = randn(3, 2, 4, 12, head_dim, generator=generator)
        ones = torch.ones_like(whole[0])
        expected = dense(*whole, ones, causal=True)
        for blocks in (TILES, None):  # None: the kernel for this device
            mine = [gaps(shard_sequence(t, 2, "zigzag")) for t in whole]
            assert not any(t.is_contiguous() for t in mine) or head_dim == 1
            out = ring_attention(*mine, True, "zigzag", block_attention=blocks)
            out.sum().backward()  # whose gradient is expanded: all strides are 0
            ours = [out.detach(), *(t.grad for t in mine)]
            found.append(error_of(ours, expected, "zigzag"))
    return found


def gaps(x: torch.Tensor) -> torch.Tensor:
    """`x` with strides as after a transpose, and every other element unused."""
    wide = x.new_full((*x.transpose(1, 3).shape, 2), float("nan"))
    wide[..., 0] = x.transpose(1, 3)
    return wide[..., 0].transpose(1, 3).detach().requires_grad_()


@pytest.mark.verifies(RING)
def test_any_head_dim_and_any_strides(world):
    for found in world(2).run(head_dims_and_strides):
        assert max(found) < 1e-12


def low_precision(dtype: torch.dtype) -> list[tuple[float, float]]:
    """Errors of output and gradients, ours and torch's, relative to float64's."""
    q, k, v, grad = (t.to(dtype) for t in qkv(4, 2, 64))
    exact = dense(*(t.double() for t in (q, k, v, grad)), causal=True)
    torchs = dense(q, k, v, grad, causal=True)
    found = []
    for attention in (ring_attention, all_gather_attention):
        mine = [shard_sequence(t, 2, "zigzag").requires_grad_() for t in (q, k, v)]
        out = attention(*mine, balance="zigzag")
        out.backward(shard_sequence(grad, 2, "zigzag"))
        ours = [out.detach(), *(t.grad for t in mine)]
        assert {t.dtype for t in ours} == {dtype}
        whole = [unshard_sequence(t, 2, "zigzag") for t in ours]
        found += [
            tuple(((x.double() - e).norm() / e.norm()).item() for x in (a, b))
            for a, b, e in zip(whole, torchs, exact, strict=True)
        ]
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.verifies(RING, GATHERED)
def test_in_fewer_bits_the_error_is_that_of_torch(world, dtype):
    for found in world(4).run(low_precision, dtype):
        for ours, torchs in found:
            assert 0 < ours < 1.5 * torchs, (ours, torchs)


def two_sub_groups() -> float:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    number = dist.get_rank() % 2
    whole = qkv(2, 2, 8, seed=number)
    return max(max(errors_of(name, whole, group=groups[number])) for name in NAMES)


@pytest.mark.verifies(RING, GATHERED, ULYSSES)
def test_two_groups_attend_to_sequences_of_their_own(world):
    assert max(world(4).run(two_sub_groups)) < 1e-12


def only_queries_are_trained() -> list[tuple[float, int, int]]:
    size = dist.get_world_size()
    q, k, v, grad = qkv(2, 2, 4 * size)
    expected = dense(q, k, v, grad, causal=True)
    q, k, v, grad = (shard_sequence(t, 2) for t in (q, k, v, grad))
    found = []
    for attention in (ring_attention, all_gather_attention):
        q.grad = None
        out = attention(q.requires_grad_(), k, v)
        with CommLedger() as ledger:
            out.backward(grad)
        error = error_of([q.grad], expected[1:2])
        collectives = sum(e.kind == "collective" for e in ledger.events)
        found.append((error, ledger.messages, collectives))
    return found


def one_is_trained() -> list[float]:
    """Errors of the only gradient, with queries, keys or values trained alone."""
    size = dist.get_world_size()
    *whole, grad = qkv(2, 2, 4 * size)
    _, *expected = dense(*whole, grad, causal=True)
    found = []
    for attention in ALL:
        for place in range(3):
            mine = [shard_sequence(t, 2) for t in whole]
            mine[place].requires_grad_()
            attention(*mine).backward(shard_sequence(grad, 2))
            found.append(error_of([mine[place].grad], expected[place : place + 1]))
    return found


@pytest.mark.verifies(RING, GATHERED, ULYSSES)
def test_one_of_queries_keys_and_values_may_be_trained_alone(world):
    for found in world(2).run(one_is_trained):
        assert len(found) == 9 and max(found) < 1e-12, "as LoRA trains values alone"


@pytest.mark.verifies(RING, GATHERED)
def test_keys_without_gradients_send_none_home(world):
    for ring, gathered in world(3).run(only_queries_are_trained):
        assert ring[0] < 1e-12 and ring[1:] == (2, 0), "K and V, N - 1 times"
        assert gathered[0] < 1e-12 and gathered[1:] == (0, 1), "one all-gather"


def twice() -> list[str]:
    """A gradient penalty: torch alone would leave it out without a word."""
    told = []
    for attention in (ring_attention, all_gather_attention, windowed):
        q, k, v, _ = qkv(2, 2, 4)
        out = attention(q.requires_grad_(), k, v)
        try:
            (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
            told.append(str(grad))
        except RuntimeError as error:
            told.append(str(error))
    return told


def windowed(q, k, v):
    return ulysses_attention(q, k, v, window=2)


@pytest.mark.verifies(RING, GATHERED, ULYSSES)
@pytest.mark.verifies("xtrain.context_parallel.running_attention:first_derivative")
def test_a_second_derivative_is_refused(world):
    for told in world(2).run(twice):
        assert all("create_graph" in message for message in told)


def under_autocast() -> list[tuple]:
    """Each attention under autocast, by kernels and by tiles, against torch's."""
    q, k, v, _ = (t.float() for t in qkv(2, 2, 8))
    found = []
    for attention in ALL:
        for hidden in ({}, {"window": 3}):
            mine = [shard_sequence(t, 2).requires_grad_() for t in (q, k, v)]
            with torch.autocast(device_type(), torch.bfloat16):
                out = attention(*mine, **hidden)
                out.float().sum().backward()
                torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                exact = attention(*(t.detach().double() for t in mine), **hidden)
            plain = attention(*(t.detach().bfloat16() for t in mine), **hidden)
            found.append((
                out.dtype == torchs.dtype, torch.equal(out, plain),
                mine[1].grad.dtype, exact.dtype,
            ))  # fmt: skip
    return found


@pytest.mark.verifies(RING, GATHERED, ULYSSES, CAST)
def test_autocast_casts_what_it_casts_for_torch(world):
    for found in world(2).run(under_autocast):
        assert found == [(True, True, torch.float32, torch.float64)] * 6


@pytest.mark.verifies("xtrain.context_parallel.block_attention:cuda_forward")
@pytest.mark.verifies("xtrain.context_parallel.block_attention:cuda_backward")
def test_the_kernels_for_gpus_fit_their_schemas():
    q = torch.empty(2, 4, 6, 16, dtype=torch.bfloat16, device="meta")
    k = q[:, :2]
    out, lse = FUSED_CUDA.forward(q, k, k, True, 0.3)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    dq, dk, dv = FUSED_CUDA.backward(out, q, k, k, out, lse, True, 0.3)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_kernels_for_gpus_equal_the_tiles(causal, key_heads):
    q, k, v, grad = (
        t.to("cuda", torch.bfloat16)
        for t in randn(4, 2, 4, 300, 64, generator=torch.Generator())
    )
    k, v = k[:, :key_heads], v[:, :key_heads]
    exact = [t.double() for t in (q, k, v)]
    out, lse = FUSED_CUDA.forward(q, k, v, causal, 0.2)
    right, right_lse = TILES.forward(*exact, causal, 0.2)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-2)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=2e-2)
    found = FUSED_CUDA.backward(grad, q, k, v, out, lse, causal, 0.2)
    expected = TILES.backward(grad.double(), *exact, right, right_lse, causal, 0.2)
    for ours, tiled in zip(found, expected, strict=True):
        assert (ours.double() - tiled).norm() < 0.02 * tiled.norm()
