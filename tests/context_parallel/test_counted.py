"""What ring attention does in a real run: pairs, messages, their order, memory."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.context_parallel.attention_cases import dense, qkv
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger
from xtrain.context_parallel import (
    all_gather_attention,
    mask,
    ring_attention,
    shard_sequence,
)
from xtrain.context_parallel.block_attention import TILES, BlockAttention, best_for
from xtrain.plan import context_bytes, critical_pairs, pairs_by_step

RING = "xtrain.context_parallel.ring_attention:ring_attention"
VISITS = "xtrain.comm.ring_pass:RingPass"
BALANCES = ("none", "striped", "zigzag")


def parts(balance: str, local: int, dtype=torch.float64, heads=1) -> list[torch.Tensor]:
    """This rank's q, k, v and gradient of the output."""
    whole = qkv(heads, 1, local * dist.get_world_size())
    return [shard_sequence(t.to(dtype), 2, balance) for t in whole]


class Counting:
    """Blocks that write down the pairs they compute, forward and backward."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []

    def attention(self) -> BlockAttention:
        def forward(q, k, v, causal, scale):
            self.forward.append(pairs(q, k, causal))
            return TILES.forward(q, k, v, causal, scale)

        def backward(grad, q, k, v, out, lse, causal, scale):
            self.backward.append(pairs(q, k, causal))
            return TILES.backward(grad, q, k, v, out, lse, causal, scale)

        return BlockAttention(forward, backward)


def pairs(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    whole = torch.ones(q.shape[2], k.shape[2])
    return int((whole.tril() if causal else whole).sum())


def work(local: int) -> list[tuple[list[int], list[int]]]:
    found = []
    for balance in BALANCES:
        counting = Counting()
        q, k, v, grad = parts(balance, local)
        out = ring_attention(
            q.requires_grad_(), k, v, True, balance,
            block_attention=counting.attention(),
        )  # fmt: skip
        out.backward(grad)
        found.append((counting.forward, counting.backward))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.verifies(RING)
@pytest.mark.verifies("xtrain.plan.context_parallel:pairs_by_step")
def test_ranks_compute_the_pairs_that_the_formula_says(world, ranks):
    local = 4
    by_rank = world(ranks).run(work, local)
    for number, balance in enumerate(BALANCES):
        formula = pairs_by_step(balance, ranks, local)
        for rank in range(ranks):
            expected = [n for n in formula[rank] if n > 0]  # the others are skipped
            assert by_rank[rank][number] == (expected, expected), (balance, rank)
    if ranks == 4:
        totals = [[sum(found[n][0]) for found in by_rank] for n in range(3)]
        assert totals == [[10, 26, 42, 58], [28, 32, 36, 40], [34] * 4]
        assert [critical_pairs(b, 4, 4) for b in BALANCES] == [58, 40, 34]


def compared(ledger: CommLedger, balance: str, **hidden) -> tuple[float, int, int]:
    """The largest error of output and gradients, and the bytes sent for each."""
    size = dist.get_world_size()
    whole, documents = qkv(2, 1, 4 * size), hidden.pop("documents", None)
    expected = dense(*whole, True, documents=documents, **hidden)
    if documents is not None:
        hidden["documents"] = shard_sequence(documents, 1, balance)
    q, k, v, grad = (shard_sequence(t, 2, balance) for t in whole)
    mine, before = [t.requires_grad_() for t in (q, k, v)], bytes_sent(ledger)
    out = ring_attention(*mine, True, balance, **hidden)
    forward = bytes_sent(ledger) - before
    out.backward(grad)
    backward = bytes_sent(ledger) - before - forward
    errors = [
        (found - shard_sequence(right, 2, balance)).abs().max().item()
        for found, right in zip([out, q.grad, k.grad, v.grad], expected, strict=True)
    ]
    return max(errors), forward, backward


def bytes_sent(ledger: CommLedger) -> int:
    return sum(event.nbytes for event in ledger.events if event.kind == "send")


def windows(length: int) -> list[int]:
    """A ring of 4 tokens a rank gets longer at 2, 6, 10 and so on; 99 is beyond it."""
    return [1, 2, 5, 6, length // 2 + 1, length // 2 + 2, length, 99]


def cases_of(length: int) -> list[tuple[str, int]]:
    dealt = [(balance, w) for balance in ("striped", "zigzag") for w in (1, 6, 99)]
    return [("none", window) for window in windows(length)] + dealt


def every_window() -> list[tuple[float, int, int]]:
    length = 4 * dist.get_world_size()
    with CommLedger() as ledger:  # takes its time to begin and to end
        return [compared(ledger, balance, window=w) for balance, w in cases_of(length)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.verifies(RING, VISITS, "xtrain.plan.context_parallel:context_bytes")
def test_a_ring_over_runs_sends_no_block_that_a_window_hides_from_all(world, ranks):
    """Striped and zigzag spread each window over ranks: these rings have all hops."""
    expected = [
        context_bytes(
            "ring", 4, 2, 1, 6, ranks, batch=2, itemsize=8,
            window=window if balance == "none" else None,
        )
        for balance, window in cases_of(4 * ranks)
    ]  # fmt: skip
    assert expected[0] == (0, 0)  # a window of 1
    for found in world(ranks).run(every_window):
        for (error, *sent), formula in zip(found, expected, strict=True):
            assert error < 1e-12
            assert tuple(sent) == formula


def packed(lengths: list[int]) -> tuple[float, int, int]:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    with CommLedger() as ledger:
        return compared(ledger, "none", documents=ids.expand(2, -1))


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [([4, 4, 4, 4], 1), ([3, 5, 4, 1, 3], 2), ([2, 7, 7], 3), ([3, 13], 4), ([16], 4)],
)
@pytest.mark.verifies(RING)
def test_documents_that_end_early_make_a_ring_over_runs_shorter(world, lengths, steps):
    window = 1 + 4 * (steps - 1)  # one that needs as many steps
    formula = context_bytes("ring", 4, 2, 1, 6, 4, batch=2, itemsize=8, window=window)
    for error, *sent in world(4).run(packed, lengths):
        assert error < 1e-12
        assert tuple(sent) == formula


def sent(dtype: torch.dtype) -> list[tuple[int, int, int, int]]:
    """Bytes and messages, forward and backward."""
    q, k, v, grad = parts("none", 4, dtype, heads=2)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with CommLedger() as forward:
        out = ring_attention(q, k, v)
    with CommLedger() as backward:
        out.backward(grad)
    return [
        sum(e.nbytes for e in ledger.events if e.kind == "send")
        for ledger in (forward, backward)
    ] + [forward.messages, backward.messages]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.verifies(RING, VISITS, "xtrain.plan.context_parallel:context_bytes")
def test_a_rank_sends_the_bytes_of_the_formula_in_n_minus_1_hops(world, ranks, dtype):
    formula = context_bytes("ring", 4, 2, 1, 6, ranks, batch=2, itemsize=dtype.itemsize)
    hops = ranks - 1
    home = ranks if ranks > 1 else 0
    for found in world(ranks).run(sent, dtype):
        assert found == [*formula, hops, hops + home]


class Watching(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, imports the compiler: seconds


class Log(Watching):
    """Sends and receives, in the order in which they are issued."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in ("send", "recv_"):
            self.lines.append(name.rstrip("_"))
        return func(*args, **(kwargs or {}))


def logged(best: BlockAttention, lines: list[str]) -> BlockAttention:
    """The kernel of this device, with a line for each block."""

    def noted(call):
        def block(*arguments):
            lines.append("block")
            return call(*arguments)

        return block

    return BlockAttention(noted(best.forward), noted(best.backward))


def order() -> tuple[list[str], list[str]]:
    q, k, v, grad = parts("zigzag", 4)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    lines: list[str] = []
    blocks = logged(best_for(q), lines)
    with Log(lines):
        out = ring_attention(q, k, v, True, "zigzag", block_attention=blocks)
        forward = lines.copy()
        out.backward(grad)
    return forward, lines[len(forward) :]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.verifies(RING, VISITS)
def test_the_next_keys_travel_while_a_block_is_computed(world, ranks):
    hop = ["recv", "send"]
    for forward, backward in world(ranks).run(order):
        assert forward == [*hop, "block"] * (ranks - 1) + ["block"]
        assert backward == [
            *[*hop, "block", *hop] * (ranks - 1),  # K and V travel, then dK and dV
            "block", *hop,  # the last block; dK and dV return to their owner
        ]  # fmt: skip


class Largest(Watching):
    """The elements of the largest tensor that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def largest(local: int, hidden: dict) -> list[int]:
    """Of ring and all-gather attention, with tiles of 16, forward and backward."""
    found = []
    documents = (
        torch.arange(local).expand(2, -1) // 10 if "documents" in hidden else None
    )
    for attention in (ring_attention, all_gather_attention):
        q, k, v, grad = parts("striped", local)
        with replaced(mask, "TILE", 16), Largest() as seen:
            out = attention(
                q.requires_grad_(), k, v, balance="striped", block_attention=TILES,
                window=hidden.get("window"), documents=documents,
            )  # fmt: skip
            out.backward(grad)
        found.append(seen.elements)
    return found


@pytest.mark.parametrize("hidden", [{}, {"window": 40}, {"documents": True}])
@pytest.mark.verifies(RING, "xtrain.context_parallel.flash:forward_tiles")
@pytest.mark.verifies("xtrain.context_parallel.flash:backward_tiles")
def test_the_matrix_of_scores_never_exists(world, hidden):
    ranks, local, batch, head_dim = 2, 120, 2, 6
    for ring, gathered in world(ranks).run(largest, local, hidden):
        assert ring <= 2 * batch * local * head_dim, "K and V of one rank"
        assert gathered <= ranks * 2 * batch * local * head_dim, "K and V of all"
        assert ring < local * local, "not even the scores of one block"


def kept(tokens: int) -> tuple[int, list[tuple[int, bool, bool]]]:
    """Bytes that autograd keeps; and without gradients: how many tensors it keeps,
    whether the output is one of them, whether the keys outlive the call."""
    local = tokens // dist.get_world_size()
    packed: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed.append(x)
        return x

    without = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                q, k, v, _ = parts("none", local)
                held = weakref.ref(k)
                out = ring_attention(q.requires_grad_(), k, v)
                del k
            without.append((len(packed), out.requires_grad, held() is not None))
        q, k, v, _ = parts("none", local)
        ring_attention(q.requires_grad_(), k, v)
    return sum(t.numel() * t.element_size() for t in packed), without


@pytest.mark.verifies(RING)
def test_autograd_keeps_a_share_per_rank_and_nothing_in_a_prefill(world):
    tokens, batch, head_dim = 24, 2, 6
    whole = batch * tokens * (4 * head_dim + 1) * 8  # q, k, v, out and lse
    for ranks in (1, 2, 4):
        for nbytes, without in world(ranks).run(kept, tokens):
            assert nbytes == whole // ranks
            assert without == [(0, False, False)] * 2
