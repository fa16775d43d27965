"""Of attention over one sequence: outputs, dq, dk and dv are those of one process."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import GROUP, Sent, gradient, randn, same, sends

SIZES = {
    "ring_attention_backward": (1, 2, 3, 4),
    "ring_attention_forward": (1, 2, 3, 4),
    "ulysses_attention": (1, 2, 4, 8),
}
"""World sizes of checks that are not for any."""


def check_all_gather_attention(form: Any, rank: int, size: int) -> None:
    """Runs of a sequence of 24: output, dq, dk and dv of one process."""
    whole = [randn(2, h, 24, 8, seed=h) for h in (4, 2, 2)]
    q, k, v = (x.requires_grad_() for x in whole)
    grad = randn(2, 4, 24, 8, seed=9)
    for causal in (True, False):
        q.grad = k.grad = v.grad = None
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
        out.backward(grad)
        mine = [x.detach().chunk(size, 2)[rank].requires_grad_() for x in (q, k, v)]
        with Sent() as sent:
            found = form(mine[0], mine[1], mine[2], causal)
            found.backward(grad.chunk(size, 2)[rank])
        same(f"attention, causal={causal}", found, out.chunk(size, 2)[rank])
        for what, x, full in zip("qkv", mine, (q, k, v), strict=True):
            part = gradient(full).chunk(size, 2)[rank]
            same(f"d{what}, causal={causal}", gradient(x), part)
    nbytes = 2 * (k.nbytes + v.nbytes)
    sends(
        sent,
        "(N-1)/N of all K and V forward, and of dK and dV",
        (size - 1) / size * nbytes,
    )


def check_flash_attention_backward(form: Any, rank: int, size: int) -> None:
    """Three tiles of queries and of keys, with 4 query heads to 2 key heads."""
    length = 2 * 128 + 7  # three tiles of a form
    q = randn(1, 4, length, 8, seed=rank).requires_grad_()
    k, v = (randn(1, 2, length, 8, seed=s) for s in (8, 9))
    k, v = k.requires_grad_(), v.requires_grad_()
    grad = randn(1, 4, length, 8, seed=7)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    with Sent() as sent:
        for causal, name in ((True, "causal"), (False, "not causal")):
            scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
            scores = scores.masked_fill(later, -torch.inf) if causal else scores
            lse = scores.logsumexp(-1)
            out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
            q.grad = k.grad = v.grad = None
            out.backward(grad)
            with torch.no_grad():
                found = form(grad, q, k, v, out, lse, causal)
            for what, x, whole in zip("qkv", found, (q, k, v), strict=True):
                same(f"d{what}, {name}", x, gradient(whole))
    sends(sent, "nothing", 0)


def check_flash_attention_forward(form: Any, rank: int, size: int) -> None:
    """Three tiles of queries and of keys, with 4 query heads to 2 key heads."""
    length = 2 * 128 + 7  # three tiles of a form
    q = randn(1, 4, length, 8, seed=rank)
    k, v = (randn(1, 2, length, 8, seed=s) for s in (8, 9))
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    with Sent() as sent:
        for causal, name in ((True, "causal"), (False, "not causal")):
            out, lse = form(q, k, v, causal)
            expected = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
            same(f"attention, {name}", out, expected)
            scores = q @ keys.mT / 8**0.5
            scores = scores.masked_fill(later, -torch.inf) if causal else scores
            same("its log-sum-exp", lse, scores.logsumexp(-1))
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
    q = randn(2, 4, 24, 8, seed=1).requires_grad_()
    k, v = (randn(2, 2, 24, 8, seed=s) for s in (2, 3))
    k, v = k.requires_grad_(), v.requires_grad_()
    grad = randn(2, 4, 24, 8, seed=4)
    later = torch.ones(24, 24, dtype=torch.bool).triu(1)
    run, pieces = torch.arange(24).chunk(size)[rank], torch.arange(24).chunk(2 * size)
    zigzag = torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
    for causal in (True, False):
        scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
        scores = scores.masked_fill(later, -torch.inf) if causal else scores
        lse = scores.logsumexp(-1)
        out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
        q.grad = k.grad = v.grad = None
        out.backward(grad)
        for balance, here in (("none", run), ("zigzag", zigzag)):
            dO, *qkv, o, log = (
                x.detach()[:, :, here] for x in (grad, q, k, v, out, lse)
            )
            with Sent() as sent:
                found = form(dO, qkv[0], qkv[1], qkv[2], o, log, causal, balance)
            for what, x, whole in zip("qkv", found, (q, k, v), strict=True):
                name = f"d{what}, causal={causal}, balance={balance}"
                same(name, x, gradient(whole)[:, :, here])
    nbytes = 2 * qkv[1].nbytes
    sends(
        sent,
        "N-1 times K and V, and N times dK and dV",
        (2 * size - 1) * nbytes * (size > 1),
    )


def check_ring_attention_forward(form: Any, rank: int, size: int) -> None:
    """A sequence of 24: what one process gets, causal or not, zigzag or not."""
    q = randn(2, 4, 24, 8, seed=1)
    k, v = (randn(2, 2, 24, 8, seed=s) for s in (2, 3))
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    later = torch.ones(24, 24, dtype=torch.bool).triu(1)
    run, pieces = torch.arange(24).chunk(size)[rank], torch.arange(24).chunk(2 * size)
    zigzag = torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
    for causal in (True, False):
        whole = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
        scores = q @ keys.mT / 8**0.5
        scores = scores.masked_fill(later, -torch.inf) if causal else scores
        for balance, here in (("none", run), ("zigzag", zigzag)):
            a, b, c = (x[:, :, here] for x in (q, k, v))
            with Sent() as sent:
                out, lse = form(a, b, c, causal, balance)
            name = f"causal={causal}, balance={balance}"
            same(f"attention, {name}", out, whole[:, :, here])
            same("its log-sum-exp", lse, scores.logsumexp(-1)[:, :, here])
    nbytes = 2 * b.nbytes
    sends(sent, "N-1 times K and V", (size - 1) * nbytes)


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
    whole = [randn(2, h, 24, 8, seed=h) for h in (8, 2, 2)]
    q, k, v = (x.requires_grad_() for x in whole)
    grad = randn(2, 8, 24, 8, seed=9)
    for causal in (True, False):
        q.grad = k.grad = v.grad = None
        keys, values = (x.repeat_interleave(4, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
        out.backward(grad)
        mine = [x.detach().chunk(size, 2)[rank].requires_grad_() for x in (q, k, v)]
        with Sent() as sent:
            found = form(mine[0], mine[1], mine[2], causal)
            found.backward(grad.chunk(size, 2)[rank])
        same(f"attention, causal={causal}", found, out.chunk(size, 2)[rank])
        for what, x, full in zip("qkv", mine, (q, k, v), strict=True):
            part = gradient(full).chunk(size, 2)[rank]
            same(f"d{what}, causal={causal}", gradient(x), part)
    nbytes = sum(x.nbytes for x in (mine[0], found))
    nbytes = 2 * (nbytes + max(1, size // 2) * (mine[1].nbytes + mine[2].nbytes))
    sends(
        sent,
        "(N-1)/N of q, k, v and the output forward, and of their gradients",
        (size - 1) / size * nbytes,
    )
