"""What attention over cut sequences takes: shapes, dtypes, strides, groups, modes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.context_parallel.attention_cases import attend, dense, errors, errors_of, qkv
from tests.devices import device_type, randn, skip_unless_on_a_gpu
from xtrain.comm import CommLedger
from xtrain.context_parallel import (
    all_gather_attention,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from xtrain.context_parallel.block_attention import (
    FUSED_CPU,
    FUSED_CUDA,
    TILES,
    best_for,
)

RING = "xtrain.context_parallel.ring_attention:ring_attention"
GATHERED = "xtrain.context_parallel.all_gather_attention:all_gather_attention"
ULYSSES = "xtrain.context_parallel.ulysses:ulysses_attention"
CAST = "xtrain.comm.autocast:cast_by_autocast"
ALL = (ring_attention, all_gather_attention, ulysses_attention)
NAMES = ("ring", "all_gather", "ulysses")


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


def head_dims_and_strides() -> list[list[float]]:
    """Inputs with gaps in every dim, and a gradient whose strides are all 0."""
    found = []
    for head_dim in (1, 5, 33):
        generator = torch.Generator().manual_seed(1)
        whole = randn(3, 2, 4, 12, head_dim, generator=generator)
        ones = torch.ones(()).double().expand_as(whole[0])
        expected = dense(*whole, ones, causal=True)
        for blocks in (TILES, None):  # None: the kernel for this device
            attention = partial(
                ring_attention, balance="zigzag", block_attention=blocks
            )
            found.append(
                errors(attention, (*whole, ones), expected, part_with_gaps, joined)
            )
    return found


def part_with_gaps(x: torch.Tensor) -> torch.Tensor:
    """A rank's part: of inputs with gaps, of an expanded gradient expanded, too."""
    if not any(x.stride()):
        return x[:, :, : x.shape[2] // dist.get_world_size()]
    part = gaps(shard_sequence(x, 2, "zigzag"))
    assert not part.is_contiguous() or x.shape[-1] == 1
    return part


def joined(x: torch.Tensor) -> torch.Tensor:
    return unshard_sequence(x, 2, "zigzag")


def gaps(x: torch.Tensor) -> torch.Tensor:
    """`x` with strides as after a transpose, and every other element unused."""
    wide = x.new_full((*x.transpose(1, 3).shape, 2), float("nan"))
    wide[..., 0] = x.transpose(1, 3)
    return wide[..., 0].transpose(1, 3).detach().requires_grad_()


@pytest.mark.verifies(RING)
def test_any_head_dim_and_any_strides(world):
    for found in world(2).run(head_dims_and_strides):
        assert max(map(max, found)) < 1e-12


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


def one_is_trained() -> list[tuple[float, int, int]]:
    """With queries, keys or values trained alone: the error of the only gradient, and
    messages and collectives of backward."""
    size = dist.get_world_size()
    *whole, grad = qkv(2 * size, 2, 4 * size)
    _, *expected = dense(*whole, grad, causal=True)
    found = []
    for name in NAMES:
        for place in range(3):
            mine = [shard_sequence(t, 2) for t in whole]
            mine[place].requires_grad_()
            out = attend(name, *mine)
            with CommLedger() as ledger:
                out.backward(shard_sequence(grad, 2))
            gradient = unshard_sequence(mine[place].grad, 2)
            error = (gradient - expected[place]).abs().max().item()
            collectives = sum(e.kind == "collective" for e in ledger.events)
            found.append((error, ledger.messages, collectives))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.verifies(RING, GATHERED, ULYSSES)
def test_one_may_be_trained_alone_and_frozen_keys_send_no_gradients(world, ranks):
    for found in world(ranks).run(one_is_trained):
        assert len(found) == 9, "as LoRA trains values alone"
        assert max(error for error, *_ in found) < 1e-12
        ring, gathered = found[0], found[3]  # queries alone
        assert ring[1:] == (ranks - 1, 0), "K and V, N - 1 times"
        assert gathered[1:] == (0, 1), "one all-gather"


def twice() -> list[str]:
    """A gradient penalty: torch alone would silently ignore it."""
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
    assert best_for(q) is FUSED_CPU  # shapes alone: no scores are kept


def kernels_for_gpus_against_tiles(causal, key_heads):
    q, k, v, grad = (
        t.to(torch.bfloat16)
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_kernels_for_gpus_equal_the_tiles(world, xtrain_worlds, causal, key_heads):
    skip_unless_on_a_gpu(xtrain_worlds)
    world(1).run(kernels_for_gpus_against_tiles, causal, key_heads)
