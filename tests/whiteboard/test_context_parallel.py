"""The whiteboard forms of lc6 equal one process: outputs, dq, dk and dv.

On groups of 1 to 4 ranks and on parts of the ranks, for every key heads and balance
that a form takes, in float64, fp32 and 16 bits.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.context_parallel.attention_cases import dense, qkv
from tests.devices import randn
from tests.tensor_parallel.dense import sub_group
from tests.whiteboard.ring_instead import ring_instead
from xtrain import context_parallel as library
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger
from xtrain.copying.forms import forms, header
from xtrain.whiteboard.context_parallel import all_gather_attention as gather_file
from xtrain.whiteboard.context_parallel import ring_attention_backward as backward_file
from xtrain.whiteboard.context_parallel import ring_attention_forward as forward_file
from xtrain.whiteboard.context_parallel.all_gather_attention import (
    all_gather_attention,
)
from xtrain.whiteboard.context_parallel.decode_attention import decode_attention
from xtrain.whiteboard.context_parallel.flash_attention_backward import (
    flash_attention_backward,
)
from xtrain.whiteboard.context_parallel.flash_attention_forward import (
    TILE,
    flash_attention_forward,
)
from xtrain.whiteboard.context_parallel.online_softmax import online_softmax
from xtrain.whiteboard.context_parallel.ring_attention_backward import (
    ring_attention_backward,
)
from xtrain.whiteboard.context_parallel.ring_attention_forward import (
    ring_attention_forward,
)
from xtrain.whiteboard.context_parallel.shard_sequence import shard_sequence
from xtrain.whiteboard.context_parallel.ulysses_attention import ulysses_attention

SOFTMAX = "xtrain.whiteboard.context_parallel.online_softmax:online_softmax"
FLASH = (
    "xtrain.whiteboard.context_parallel.flash_attention_forward:flash_attention_forward"
)
FLASH_BACK = (
    "xtrain.whiteboard.context_parallel.flash_attention_backward"
    ":flash_attention_backward"
)
RING = (
    "xtrain.whiteboard.context_parallel.ring_attention_forward:ring_attention_forward"
)
RING_BACK = (
    "xtrain.whiteboard.context_parallel.ring_attention_backward:ring_attention_backward"
)
SHARD = "xtrain.whiteboard.context_parallel.shard_sequence:shard_sequence"
GATHERED = (
    "xtrain.whiteboard.context_parallel.all_gather_attention:all_gather_attention"
)
DECODE = "xtrain.whiteboard.context_parallel.decode_attention:decode_attention"
ULYSSES = "xtrain.whiteboard.context_parallel.ulysses_attention:ulysses_attention"

GROUPS = [None, [0], [0, 1], [0, 1, 2], [1, 3]]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 0.02,
    torch.bfloat16: 0.08,
}
"""Of the largest value, if above 1; one process has the same inputs in float64."""
HEADS = [(2, 1), (3, 3), (6, 2)]


def near(actual: Tensor, expected: Tensor, what: str, dtype) -> None:
    assert actual.shape == expected.shape, what
    allowed = TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    error = (actual.detach().double() - expected).abs().max().item()
    assert error <= allowed, f"{what}: {error} > {allowed}"


def inputs(heads: int, key_heads: int, length: int, dtype) -> list[Tensor]:
    return [t.to(dtype) for t in qkv(heads, key_heads, length)]


def of_one_process(tensors, causal, scale) -> list[Tensor]:
    return dense(*(t.double() for t in tensors), causal, scale)


# --- on one device --------------------------------------------------------------------


@pytest.mark.verifies(SOFTMAX)
def test_online_softmax_is_the_librarys_for_any_block():
    generator = torch.Generator().manual_seed(5)
    scores = randn(2, 3, 4, 13, generator=generator) * 40
    scores[0, 0, :, :6] = -torch.inf  # whole blocks of it
    scores[1, 2, 3] = -torch.inf  # a row that sees nothing
    values = randn(2, 3, 13, 5, generator=generator)
    for block_size, dtype in itertools.product((1, 2, 5, 13, 128), TOLERANCE):
        out, lse = online_softmax(scores.to(dtype), values.to(dtype), block_size)
        low, low_values = scores.to(dtype).double(), values.to(dtype).double()
        expected = torch.nan_to_num(low.softmax(-1)) @ low_values
        near(out, expected, f"{dtype}, {block_size}", dtype)
        right_out, right_lse = library.online_softmax(
            scores.to(dtype), values.to(dtype)
        )
        assert (out.dtype, lse.dtype) == (right_out.dtype, right_lse.dtype)
        torch.testing.assert_close(lse, right_lse)
        assert out[1, 2, 3].count_nonzero() == 0 and lse[1, 2, 3] == -torch.inf


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.verifies(FLASH, FLASH_BACK)
def test_tiles_equal_one_softmax(causal):
    for heads, key_heads in HEADS:
        for length in (1, TILE - 1, TILE, 2 * TILE + 3):
            many = length > TILE and heads == 6
            for dtype in TOLERANCE if many else (torch.float64,):
                q, k, v, grad = tensors = inputs(heads, key_heads, length, dtype)
                for scale in (None, 0.3):
                    out, lse = flash_attention_forward(q, k, v, causal, scale)
                    grads = flash_attention_backward(
                        grad, q, k, v, out, lse, causal, scale
                    )
                    expected = of_one_process(tensors, causal, scale)
                    assert out.dtype == dtype
                    for x, right in zip((out, *grads), expected, strict=True):
                        near(x, right, f"{length}, {dtype}", dtype)


def test_fewer_queries_than_keys_and_keys_in_parts():
    """As a rank of a ring does it: one lse for all keys, a backward for each part."""
    q, k, v, grad = inputs(2, 1, 9, torch.float64)
    q, grad = q[:, :, :4], grad[:, :, :4]
    out, lse = flash_attention_forward(q, k, v, False)
    expected = dense(q, k, v, grad, False)
    near(out, expected[0], "out", torch.float64)
    parts = [
        flash_attention_backward(grad, q, k_part, v_part, out, lse, False)
        for k_part, v_part in zip(k.split(5, 2), v.split(5, 2), strict=True)
    ]
    dq, dk, dv = zip(*parts, strict=True)
    for x, right in zip((sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)), expected[1:],
                        strict=True):  # fmt: skip
        near(x, right, "gradients", torch.float64)


# --- over ranks -----------------------------------------------------------------------


def on_every_group(case, *args) -> None:
    for members in GROUPS:
        group = sub_group(members) if members else None
        if members is None or group is not None:
            case(group, dist.get_world_size(group), *args)


def ring(q, k, v, grad, causal, balance, scale, group) -> list[Tensor]:
    how = causal, balance, scale, group
    out, lse = ring_attention_forward(q, k, v, *how)
    return [out, *ring_attention_backward(grad, q, k, v, out, lse, *how)]


def gathered(q, k, v, grad, causal, balance, scale, group) -> list[Tensor]:
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    out = all_gather_attention(q, k, v, causal, scale, group)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def ulysses(q, k, v, grad, causal, balance, scale, group) -> list[Tensor]:
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    out = ulysses_attention(q, k, v, causal, scale, group)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


LAYOUTS = {ring: ("none", "zigzag"), gathered: ("none",), ulysses: ("none",)}


def attention_case(group, size, form) -> None:
    for heads, key_heads in HEADS:
        factor = size if form is ulysses else 1
        for local, balance in itertools.product((2, 5, 10), LAYOUTS[form]):
            if balance == "zigzag" and local % 2:
                continue
            many = local == 10 and heads == 6
            for dtype in TOLERANCE if many else (torch.float64,):
                for causal, scale in ((True, None), (False, 0.3), (False, 0.0)):
                    tensors = inputs(factor * heads, key_heads, local * size, dtype)
                    mine = [shard_sequence(t, 2, balance, group) for t in tensors]
                    kept = [t.clone() for t in mine]
                    found = form(*mine, causal, balance, scale, group)
                    expected = of_one_process(tensors, causal, scale)
                    names = ("out", "dq", "dk", "dv")
                    for name, x, whole in zip(names, found, expected, strict=True):
                        part = shard_sequence(whole, 2, balance, group)
                        near(x, part, f"{name} {heads} {balance} {dtype}", dtype)
                    assert all(map(torch.equal, mine, kept)), "inputs written"


@pytest.mark.verifies(RING, RING_BACK, SHARD)
def test_the_ring_equals_one_process(world):
    world(4).run(on_every_group, attention_case, ring)


@pytest.mark.verifies(GATHERED)
def test_all_gather_equals_one_process(world):
    world(4).run(on_every_group, attention_case, gathered)


@pytest.mark.verifies(ULYSSES)
def test_ulysses_equals_one_process(world):
    world(4).run(on_every_group, attention_case, ulysses)


def decode_case(group, size) -> None:
    """Token by token from the first on, whose key is the only one there is."""
    rank, length = dist.get_rank(group), 2 * size + 1
    for heads, key_heads in HEADS:
        for dtype in TOLERANCE if heads == 6 else (torch.float64,):
            for scale in (None, 0.3, 0.0, 500.0):  # of e^500 there is no sum
                if scale == 500.0 and dtype != torch.float64:
                    continue
                tensors = inputs(heads, key_heads, length, dtype)
                for place in range(length):
                    seen = [t[:, :, : place + 1] for t in tensors]
                    seen[0], seen[3] = (t[:, :, [-1]] for t in (seen[0], seen[3]))
                    expected = of_one_process(seen, False, scale)[0]
                    keys = slice(rank, place + 1, size)  # by turns, the new one as well
                    mine = [t[:, :, keys].clone() for t in tensors[1:3]]
                    given = [seen[0], *mine]
                    kept = [t.clone() for t in given]
                    out = decode_attention(*given, scale, group)
                    what = f"token {place}, {heads} heads, {dtype}, {scale}"
                    near(out, expected, what, dtype)
                    assert out.dtype == dtype
                    if dtype.itemsize == 2:  # rounded once, at the end
                        eps = torch.finfo(dtype).eps
                        assert torch.allclose(out.double(), expected, eps, 1e-5)
                    assert all(map(torch.equal, given, kept)), "inputs written"
                    first = out.clone()
                    dist.broadcast(first, group=group, group_src=0)
                    assert torch.equal(out, first), "or ranks choose other tokens"


@pytest.mark.verifies(DECODE)
def test_a_token_attends_to_a_cache_on_many_ranks_as_in_one_process(world):
    world(4).run(on_every_group, decode_case)


# --- what they send, and when ---------------------------------------------------------


def traffic(name, dtype) -> tuple[int, int, int]:
    """Bytes sent, those of K and V, and those of a wide dK and dV."""
    size = dist.get_world_size()
    q, k, v, grad = inputs(4, 2, 4 * size, dtype)
    mine = [shard_sequence(t, 2, "zigzag") for t in (q, k, v, grad)]
    kv, wide = 2 * mine[1].nbytes, 2 * mine[1].numel() * max(4, dtype.itemsize)
    how = (True, "zigzag", None, None)
    out, lse = ring_attention_forward(*mine[:3], *how)
    with CommLedger() as ledger, ring_instead(gather_file):
        if name == "forward":
            ring_attention_forward(*mine[:3], *how)
        elif name == "backward":
            ring_attention_backward(mine[3], *mine[:3], out, lse, *how)
        else:
            gathered(*mine, *how)
    return ledger.bytes_sent, kv, wide


SENT = {
    "forward": ("ring_attention_forward", "N-1 times K and V, to the next rank.",
                lambda n, kv, wide: (n - 1) * kv),
    "backward": ("ring_attention_backward", "N-1 times K and V, and N times dK and dV",
                 lambda n, kv, wide: (n - 1) * kv + (n > 1) * n * wide),
    "gather": ("all_gather_attention", "(N-1)/N of all K and V forward, and of dK and",
               lambda n, kv, wide: (n - 1) * (kv + wide)),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_sends_what_the_header_says(world, size, name):
    form, words, formula = SENT[name]
    assert header(forms()[form].read_text())["Sends"].startswith(words)
    for dtype in (torch.float64, torch.bfloat16):
        for sent, kv, wide in world(size).run(traffic, name, dtype):
            assert sent == formula(size, kv, wide)


class Noted:
    """torch.distributed, of which is noted when messages begin and are waited for."""

    def __init__(self, events: list[str]):
        self.events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def batch_isend_irecv(self, p2p: list[Any]) -> list[Any]:
        self.events.append("begin")
        return [NotedWork(work, self.events) for work in dist.batch_isend_irecv(p2p)]


class NotedWork:
    def __init__(self, work: Any, events: list[str]):
        self.work, self.events = work, events

    def wait(self) -> None:
        self.work.wait()
        if self.events[-1] != "wait":
            self.events.append("wait")


class Products(TorchDispatchMode):
    """Notes matrix products, those in a row once."""

    def __init__(self, events: list[str]):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "bmm" in func.name() and self.events[-1:] != ["compute"]:
            self.events.append("compute")
        return func(*args, **(kwargs or {}))


def order_of_events() -> tuple[list[str], list[str]]:
    mine = [shard_sequence(t, 2) for t in inputs(2, 1, 2 * dist.get_world_size(),
                                                 torch.float64)]  # fmt: skip
    found: list[list[str]] = []
    out = lse = None
    for file in (forward_file, backward_file):
        events: list[str] = []
        with replaced(file, "dist", Noted(events)), Products(events):
            if file is forward_file:
                out, lse = ring_attention_forward(*mine[:3], False)
            else:
                ring_attention_backward(mine[3], *mine[:3], out, lse, False)
        found.append(events)
    return tuple(found)


@pytest.mark.verifies(RING, RING_BACK)
def test_the_next_keys_are_on_their_way_while_a_block_is_computed(world):
    step = ["begin", "compute", "wait"]
    # dK and dV of the step before arrive under the whole block, and then leave again.
    first = ["begin", "compute", "begin", "wait"]
    middle = ["begin", "compute", "wait", "begin", "wait"]
    last = ["compute", "wait", "begin", "wait"]
    for forward, backward in world(4).run(order_of_events):
        assert forward == [*step, *step, *step, "compute"]
        assert backward == [*first, *middle, *middle, *last]
