"""Of experts and their rows: values and gradients of every expert for every token."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xtrain.copying.self_checks.harness import (
    GROUP,
    Sent,
    computes,
    gradient,
    randn,
    same,
    sends,
)

SIZES = {
    "combine": (4, 8),
    "dispatch": (1, 2, 4, 8),
    "gshard_moe": (1, 2, 4, 8),
    "overlapped_all_to_all": (1, 2, 4, 8),
}
"""World sizes of checks that are not for any."""


def masked(scores: Tensor, top_k: int) -> Tensor:
    """Gates of every expert: zero but for the best ones, which add up to one."""
    kept = scores * torch.zeros_like(scores).scatter(1, scores.topk(top_k)[1], 1)
    return kept / kept.sum(-1, keepdim=True)


def of_every_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The output of every expert for every token, [tokens, experts, hidden]."""
    inner = F.silu(torch.einsum("th,efh->tef", x, gate))
    inner = inner * torch.einsum("th,efh->tef", x, up)
    return torch.einsum("tef,ehf->teh", inner, down)


def check_combine(form: Any, rank: int, size: int) -> None:
    """Rows that two ranks swap come back, and each token gets its weighted sum."""
    # Rank r has expert r. Its token t went to experts r and r + t + 1: one on its own.
    gates = randn(3, 2, seed=rank)
    everyone = [randn(3, 6, seed=9 + r) for r in range(size)]
    chosen = [[[r, (r + t + 1) % size] for t in range(3)] for r in range(size)]
    leaving = sorted(range(6), key=lambda n: chosen[rank][n // 2][n % 2])
    sent_rows = [sum(row.count(e) for row in chosen[rank]) for e in range(size)]
    came = [[t for t in range(3) if rank in chosen[r][t]] for r in range(size)]
    rows = torch.cat([everyone[r][came[r]] for r in range(size)]) * (rank + 1)
    place = torch.arange(len(rows)).flip(0)  # as if this rank had sorted them so
    plan = torch.tensor(leaving), place, sent_rows, [len(c) for c in came], None
    with Sent() as sent:
        y = form(rows[place], gates, plan)
    factors = torch.tensor(chosen[rank]) + 1  # what the experts do
    expected = everyone[rank] * (gates * factors).sum(1, keepdim=True)
    same("each token's sum of its experts' outputs", y, expected)
    away = len(rows) - len(came[rank])
    sends(sent, "the rows that came from other ranks", away * rows[0].nbytes)


def check_dispatch(form: Any, rank: int, size: int) -> None:
    """Ranks with 3, 4, 5 and 0 tokens: each expert gets what all ranks have for it."""
    tokens = [3, 4, 5, 0, 1, 2, 6, 4][:size]
    x = [randn(n, 6, seed=r) for r, n in enumerate(tokens)]
    experts = [randn(n, 8, seed=50 + r).topk(2)[1] for r, n in enumerate(tokens)]
    with Sent() as sent:
        rows, arrived, _ = form(x[rank], experts[rank], 8)
    each, expected = 8 // size, []
    for expert in range(rank * each, (rank + 1) * each):
        came = [x[r][experts[r].eq(expert).any(-1)] for r in range(size)]
        expected.append(torch.cat(came))
    same("rows by expert, then by rank", rows, torch.cat(expected))
    lengths = torch.tensor([len(e) for e in expected])
    same("how many each of the experts has got", arrived, lengths)
    away = int(experts[rank].div(each, rounding_mode="floor").ne(rank).sum())
    counts, nbytes = 8 - each, 6 * rows.itemsize
    sends(
        sent,
        "E/N counts to each other rank, then the rows whose experts are elsewhere",
        counts * 8 + nbytes * away,
    )


def check_gshard_moe(form: Any, rank: int, size: int) -> None:
    """Eight experts over ranks that have 3, 4, 5 and 0 tokens: one process's."""
    tokens, each = [3, 4, 5, 0, 1, 2, 6, 4][:size], 8 // size
    shapes = {"gate_proj": (8, 5, 6), "up_proj": (8, 5, 6), "down_proj": (8, 6, 5)}
    whole = {
        name: randn(*shape, seed=i).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }
    router = randn(8, 6, seed=3).requires_grad_()
    x = randn(sum(tokens), 6, seed=4).requires_grad_()
    grad = randn(sum(tokens), 6, seed=5)

    scores = (x @ router.T).softmax(-1)  # every expert for every token, and gates of 0
    experts, gates = scores.topk(2)[1], masked(scores, 2)
    y = torch.einsum("te,teh->th", gates, of_every_expert(x, *whole.values()))
    y.backward(grad)

    routing = SimpleNamespace(weight=router, top_k=2)
    layer = form(SimpleNamespace(router=routing, experts=SimpleNamespace(**whole)))
    mine = x.detach().split(tokens)[rank].requires_grad_()
    with Sent() as sent:
        out = layer(mine)
        out.backward(grad.split(tokens)[rank])
    same("output", joined(out, tokens, rank), y)
    same("dx", joined(gradient(mine), tokens, rank), gradient(x))
    for name, full in whole.items():
        found, expected = gradient(getattr(layer, name)), gradient(full)
        same(f"d{name} of this rank's experts", found, expected.chunk(size)[rank])
    total = gradient(layer.router)
    dist.all_reduce(total, group=GROUP.get())  # each rank has that of its tokens
    same("the routers' gradients, summed", total, gradient(router))

    to = experts.div(each, rounding_mode="floor").split(tokens)  # the experts' ranks
    leaving = int(to[rank].ne(rank).sum())
    arriving = sum(int(t.eq(rank).sum()) for r, t in enumerate(to) if r != rank)
    counts, row = 8 - each, x[0].nbytes
    sends(
        sent,
        "E/N counts to each other rank; rows to and from, forward and backward",
        counts * 8 + row * (leaving + arriving + arriving + leaving),
    )


def joined(part: Tensor, tokens: list[int], rank: int) -> Tensor:
    """The tokens of all ranks; one of them has none."""
    first, whole = sum(tokens[:rank]), part.new_zeros(sum(tokens), 6)
    whole[first : first + len(part)] = part.detach()
    dist.all_reduce(whole, group=GROUP.get())
    return whole


def check_moe_backward(form: Any, rank: int, size: int) -> None:
    """Autograd's gradients of every expert for every token, times masked gates."""
    shapes = (12, 6), (8, 6), (8, 5, 6), (8, 5, 6), (8, 6, 5)
    names = "x", "router", "gate", "up", "down"
    grad = randn(12, 6, seed=99)
    for top_k in (1, 2, 8):
        leaves = [randn(*s, seed=rank + i) / 2 for i, s in enumerate(shapes)]
        x, router, gate, up, down = (leaf.requires_grad_() for leaf in leaves)
        scores = (x @ router.T).softmax(-1)
        experts, gates = scores.topk(top_k)[1], masked(scores, top_k)
        y = torch.einsum("te,teh->th", gates, of_every_expert(x, gate, up, down))
        y.backward(grad)
        saved = (*leaves, scores, experts, gates.gather(1, experts))
        with Sent() as sent:
            found = form(grad, tuple(t.detach() for t in saved))
        for name, mine, leaf in zip(names, found, leaves, strict=True):
            what = f"d{name}, {top_k} of 8 experts"
            same(what, mine, gradient(leaf))
    sends(sent, "nothing", 0)


def check_moe_forward(form: Any, rank: int, size: int) -> None:
    """Every expert for every token, times a gate that is mostly zero."""
    x = randn(12, 6, seed=rank)
    router = randn(8, 6, seed=11)
    gate, up = (randn(8, 5, 6, seed=s) for s in (12, 13))
    down = randn(8, 6, 5, seed=14)
    probabilities = (x @ router.T).softmax(-1)
    everyone = of_every_expert(x, gate, up, down)
    for top_k in (1, 2, 8):
        with Sent() as sent:
            y, _ = form(x, router, gate, up, down, top_k)
        least = probabilities.topk(top_k)[0][:, -1:]
        gates = probabilities * (probabilities >= least)
        gates = gates / gates.sum(-1, keepdim=True)
        expected = torch.einsum("te,teh->th", gates, everyone)
        same(f"{top_k} of 8 experts for each token", y, expected)
    sends(sent, "nothing", 0)


def check_overlapped_all_to_all(form: Any, rank: int, size: int) -> None:
    """Both micro-batches as one after another; they compute in turn."""
    weights = [randn(6, 6, seed=s) for s in (1, 2, 3, 4)]
    done: list[int] = []

    def make(layer: int) -> Any:
        def chunk(i: int, rows: Tensor) -> Tensor:
            done.append(i)
            computes()
            return (rows @ weights[layer]).tanh() + i + rank

        return chunk

    chunks = [make(layer) for layer in range(4)]
    x = [randn(8, 6, seed=10 * i + rank) for i in (0, 1)]
    expected = []
    for i in (0, 1):  # one after another, each waiting for its rows
        rows = x[i]
        for chunk in chunks:
            arriving = torch.empty_like(rows)
            dist.all_to_all_single(arriving, chunk(i, rows), group=GROUP.get())
            rows = arriving
        expected.append(rows)
    done.clear()
    with Sent() as sent:
        found = form(x, chunks)
    for i in (0, 1):
        same(f"micro-batch {i} after two layers", found[i], expected[i])
    assert done == [0, 1] * 4  # in turn
    nbytes = 2 * 4 * x[0].nbytes
    sends(sent, "(N-1)/N of what each chunk returns", (size - 1) / size * nbytes)
