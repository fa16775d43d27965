"""Of attention over one sequence: outputs, dq, dk and dv are those of one process."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xtrain.copying.self_checks.harness import GROUP, Sent, gradient, randn, same, sends

SIZES = {
    "ring_attention_backward": (1, 2, 3, 4),
    "ring_attention_forward": (1, 2, 3, 4),
    "ulysses_attention": (1, 2, 4, 8),
}
"""World sizes of checks that are not for any."""


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in one process; some query heads share a key head."""
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
    scores = q @ keys.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf) if causal else scores
    return out, scores.logsumexp(-1)


def held_tokens(rank: int, size: int) -> dict[str, Tensor]:
    """Which of 24 tokens a rank has, by balance."""
    run, pieces = torch.arange(24).chunk(size)[rank], torch.arange(24).chunk(2 * size)
    zigzag = torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
    return {"none": run, "zigzag": zigzag}


def check_runs(
    form: Any, heads: int, rank: int, size: int
) -> tuple[Sent, list[Tensor]]:
    """Runs of a sequence of 24: output, dq, dk and dv of one process.

    What the last call sent, and this rank's q, k and v.
    """
    whole = [randn(2, h, 24, 8, seed=n) for n, h in enumerate((heads, 2, 2))]
    grad = randn(2, heads, 24, 8, seed=9)
    for causal in (True, False):
        qkv = [x.detach().requires_grad_() for x in whole]
        out, _ = attention(qkv[0], qkv[1], qkv[2], causal)
        out.backward(grad)
        mine = [x.chunk(size, 2)[rank].clone().requires_grad_() for x in whole]
        with Sent() as sent:
            found = form(*mine, causal)
            found.backward(grad.chunk(size, 2)[rank])
        same(f"attention, causal={causal}", found, out.chunk(size, 2)[rank])
        for what, x, full in zip("qkv", mine, qkv, strict=True):
            part = gradient(full).chunk(size, 2)[rank]
            same(f"d{what}, causal={causal}", gradient(x), part)
    return sent, mine


def check_all_gather_attention(form: Any, rank: int, size: int) -> None:
    """Four heads, runs of a sequence of 24: output, dq, dk and dv of one process."""
    sent, (_, k, v) = check_runs(form, 4, rank, size)
    words = "(N-1)/N of all K and V forward, and of dK and dV"
    sends(sent, words, 2 * (size - 1) * (k.nbytes + v.nbytes))


def check_decode_attention(form: Any, rank: int, size: int) -> None:
    """A cache of which ranks have unequal parts, and one nothing: of one process."""
    lengths = [5, 0, 9, 3, 1, 2, 6, 4][:size]
    k, v = (randn(2, 2, sum(lengths), 8, seed=s) for s in (2, 3))
    mine = [x.split(lengths, 2)[rank] for x in (k, v)]
    for name, factor in (("some", 1), ("large", 1000)):  # e^score would be infinite
        q = factor * randn(2, 4, 1, 8, seed=1)
        with Sent() as sent:
            found = form(q, *mine)
        out, _ = attention(q, k, v, False)
        same(f"attention of one token, {name} scores", found, out, 1e-12 * factor)
    nbytes = 2 * (size - 1) / size * (8 + 2) * 2 * 4 * q.itemsize
    sends(sent, "2(N-1)/N of D + 2 numbers a query head", nbytes)


def check_flash_attention_backward(form: Any, rank: int, size: int) -> None:
    """Three tiles of queries and of keys, with 4 query heads to 2 key heads."""
    length = 2 * 128 + 7  # three tiles of a form
    shapes = zip((4, 2, 2), (rank, 8, 9), strict=True)
    whole = [randn(1, heads, length, 8, seed=seed) for heads, seed in shapes]
    grad = randn(1, 4, length, 8, seed=7)
    for causal, name in ((True, "causal"), (False, "not causal")):
        q, k, v = (x.detach().requires_grad_() for x in whole)
        out, lse = attention(q, k, v, causal)
        out.backward(grad)
        with Sent() as sent, torch.no_grad():
            found = form(grad, q, k, v, out, lse, causal)
        for what, x, full in zip("qkv", found, (q, k, v), strict=True):
            same(f"d{what}, {name}", x, gradient(full))
    sends(sent, "nothing", 0)


def check_flash_attention_forward(form: Any, rank: int, size: int) -> None:
    """Three tiles of queries and of keys, with 4 query heads to 2 key heads."""
    length = 2 * 128 + 7  # three tiles of a form
    q = randn(1, 4, length, 8, seed=rank)
    k, v = (randn(1, 2, length, 8, seed=s) for s in (8, 9))
    for causal, name in ((True, "causal"), (False, "not causal")):
        with Sent() as sent:
            found = form(q, k, v, causal)
        out, lse = attention(q, k, v, causal)
        same(f"attention, {name}", found[0], out)
        same("its log-sum-exp", found[1], lse)
    sends(sent, "nothing", 0)


def check_online_softmax(form: Any, rank: int, size: int) -> None:
    """Any size of block gives torch's softmax, also if keys are hidden from a row."""
    scores = 100 * randn(2, 3, 10, seed=rank)
    values = randn(2, 10, 4, seed=5)
    scores[0, 1, :7] = -torch.inf  # the first blocks hold nothing that this row sees
    expected = scores.softmax(-1) @ values
    with Sent() as sent:
        for block in (1, 3, 10):
            out, lse = form(scores, values, block)
            same(f"attention in blocks of {block}", out, expected)
            same("its log-sum-exp", lse, scores.logsumexp(-1))
    out, lse = form(torch.full_like(scores, -torch.inf), values, 4)
    same("rows that see no key", out, torch.zeros_like(out))
    assert lse.eq(-torch.inf).all()
    sends(sent, "nothing", 0)


def check_ring_attention_backward(form: Any, rank: int, size: int) -> None:
    """A sequence of 24: dq, dk and dv of one process, each on its rank."""
    shapes = zip((4, 2, 2), (1, 2, 3), strict=True)
    whole = [randn(2, heads, 24, 8, seed=seed) for heads, seed in shapes]
    grad = randn(2, 4, 24, 8, seed=4)
    for causal in (True, False):
        full = [x.detach().requires_grad_() for x in whole]
        out, lse = attention(full[0], full[1], full[2], causal)
        out.backward(grad)
        for balance, here in held_tokens(rank, size).items():
            dO, q, k, v, o, log = (
                x.detach()[:, :, here] for x in (grad, *full, out, lse)
            )
            with Sent() as sent:
                found = form(dO, q, k, v, o, log, causal, balance)
            for what, x, leaf in zip("qkv", found, full, strict=True):
                name = f"d{what}, causal={causal}, balance={balance}"
                same(name, x, gradient(leaf)[:, :, here])
    nbytes = (2 * size - 1) * 2 * k.nbytes * (size > 1)
    sends(sent, "N-1 times K and V, and N times dK and dV", nbytes)


def check_ring_attention_forward(form: Any, rank: int, size: int) -> None:
    """A sequence of 24: what one process gets, causal or not, zigzag or not."""
    q = randn(2, 4, 24, 8, seed=1)
    k, v = (randn(2, 2, 24, 8, seed=s) for s in (2, 3))
    for causal in (True, False):
        whole, log = attention(q, k, v, causal)
        for balance, here in held_tokens(rank, size).items():
            mine = [x[:, :, here] for x in (q, k, v)]
            with Sent() as sent:
                out, lse = form(*mine, causal, balance)
            name = f"causal={causal}, balance={balance}"
            same(f"attention, {name}", out, whole[:, :, here])
            same("its log-sum-exp", lse, log[:, :, here])
    sends(sent, "N-1 times K and V", (size - 1) * 2 * mine[1].nbytes)


def check_shard_sequence(form: Any, rank: int, size: int) -> None:
    """All tokens are on one rank each, and with zigzag all ranks have as much to do."""
    positions = torch.arange(48)
    run = torch.arange(48 // size)
    pieces = positions.chunk(2 * size)
    expected = {
        "none": rank * len(run) + run,
        "striped": rank + size * run,
        "zigzag": torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]),
    }
    with Sent() as sent:
        parts = {b: form(positions, 0, b) for b in expected}
        tokens = form(positions.view(1, 48, 1).expand(2, 48, 3), -2, "zigzag")
    for balance, part in parts.items():
        same(f"the positions of rank {rank}, {balance}", part, expected[balance])
        total = torch.zeros(48, dtype=torch.int64).index_fill_(0, part, 1)
        dist.all_reduce(total, group=GROUP.get())
        same("each of them on one rank", total, torch.ones_like(total))
    same("the tokens of a batch", tokens[1, :, 2], expected["zigzag"])
    keys = (parts["zigzag"] + 1).sum()  # that causal queries see
    same("an equal part of the work", keys, torch.tensor(48 * 49 // 2 // size))
    sends(sent, "nothing", 0)


def check_ulysses_attention(form: Any, rank: int, size: int) -> None:
    """Eight heads, runs of a sequence of 24: output, dq, dk and dv of one process."""
    sent, (q, k, v) = check_runs(form, 8, rank, size)
    same("causal is the default", form(q, k, v), form(q, k, v, causal=True))
    nbytes = 2 * q.nbytes + max(1, size // 2) * (k.nbytes + v.nbytes)
    words = "(N-1)/N of q, k, v and the output forward, and of their gradients"
    sends(sent, words, (size - 1) / size * 2 * nbytes)
