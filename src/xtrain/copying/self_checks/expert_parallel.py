"""Of experts: values and gradients of every expert for every token."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xtrain.copying.self_checks.harness import Here, Sent, gradient, randn, same, sends

SIZES = {
    "combine": (4, 8),
    "dispatch": (1, 2, 4, 8),
    "gshard_moe": (1, 2, 4, 8),
    "overlapped_all_to_all": (1, 2, 4, 8),
}
"""World sizes of checks that are not for any."""


def check_combine(form: Any, rank: int, size: int) -> None:
    """Rows that two ranks swap come home, and each token gets its weighted sum."""
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


def check_expert_capacity(form: Any, rank: int, size: int) -> None:
    """The mask of a loop that gives out places one by one."""
    experts = randn(20, 8, seed=rank).topk(2)[1]
    for factor, places in ((0.5, 3), (1.0, 5), (1.25, 7), (8.0, 40)):
        with Sent() as sent:
            capacity, kept = form(experts, 8, factor)
        assert capacity == places
        expected, taken = torch.zeros(20, 2, dtype=torch.bool), [0] * 8
        for choice in range(2):
            for token in range(20):
                expert = int(experts[token, choice])
                taken[expert] += 1
                expected[token, choice] = taken[expert] <= places
        same(f"kept with {places} places", kept.int(), expected.int())
    sends(sent, "nothing", 0)


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
    experts = scores.topk(2)[1]
    kept = scores * torch.zeros_like(scores).scatter(1, experts, 1)
    gates = kept / kept.sum(-1, keepdim=True)
    inner = F.silu(torch.einsum("th,efh->tef", x, whole["gate_proj"]))
    inner = inner * torch.einsum("th,efh->tef", x, whole["up_proj"])
    y = torch.einsum("te,tef,ehf->th", gates, inner, whole["down_proj"])
    y.backward(grad)

    layer = form(
        SimpleNamespace(
            router=SimpleNamespace(weight=router, top_k=2),
            experts=SimpleNamespace(**whole),
        )
    )
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
    dist.all_reduce(total, group=Here.group)  # each rank has that of its tokens
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


def joined(part: torch.Tensor, tokens: list[int], rank: int) -> torch.Tensor:
    """The tokens of all ranks; one of them has none."""
    first, whole = sum(tokens[:rank]), part.new_zeros(sum(tokens), 6)
    whole[first : first + len(part)] = part.detach()
    dist.all_reduce(whole, group=Here.group)
    return whole


def check_load_balancing_loss(form: Any, rank: int, size: int) -> None:
    """1 with equal loads, E at collapse; counts of copies are constants in backward."""
    one = torch.tensor(1.0)
    with Sent() as sent:
        for tokens in (4, 64):  # for any number of tokens
            even = torch.arange(2 * tokens).remainder(8).view(tokens, 2)
            flat = torch.full((tokens, 8), 1 / 8)
            same("equal loads", form(flat, even), one)
        alone = torch.eye(8)[torch.zeros(10, dtype=torch.int64)]
        found = form(alone, torch.zeros(10, 1, dtype=torch.int64))
        same("one expert of 8 gets all", found, 8 * one)

        logits = randn(10, 8, seed=rank).requires_grad_()
        probabilities, mask = logits.softmax(-1), torch.arange(10) < 7
        experts = probabilities.topk(2)[1]
        loss = form(probabilities, experts, mask)
        probabilities.retain_grad()
        loss.backward()
    total, share = 0.0, torch.zeros(8)
    for token in range(7):
        for choice in experts[token].tolist():
            share[choice] += 1 / 14
    for expert in range(8):
        mean = sum(probabilities[t, expert].item() for t in range(7)) / 7
        total += 8 * share[expert].item() * mean
    same("7 of 10 tokens, 3 padded", loss.detach(), total * one)
    expected = 8 / 7 * share.expand(10, 8) * mask.unsqueeze(1)
    same("its gradient", gradient(probabilities), expected)
    sends(sent, "nothing", 0)


def check_moe_backward(form: Any, rank: int, size: int) -> None:
    """Autograd's gradients of every expert for every token, times masked gates."""
    shapes = (12, 6), (8, 6), (8, 5, 6), (8, 5, 6), (8, 6, 5)
    names = "x", "router", "gate", "up", "down"
    grad = randn(12, 6, seed=99)
    for top_k in (1, 2, 8):
        leaves = [randn(*s, seed=rank + i) / 2 for i, s in enumerate(shapes)]
        x, router, gate, up, down = (leaf.requires_grad_() for leaf in leaves)
        scores = (x @ router.T).softmax(-1)
        experts = scores.topk(top_k)[1]
        kept = scores * torch.zeros_like(scores).scatter(1, experts, 1)
        gates = kept / kept.sum(-1, keepdim=True)
        inner = F.silu(torch.einsum("th,efh->tef", x, gate))
        inner = inner * torch.einsum("th,efh->tef", x, up)
        torch.einsum("te,tef,ehf->th", gates, inner, down).backward(grad)
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
    inner = F.silu(torch.einsum("th,efh->tef", x, gate))
    inner = inner * torch.einsum("th,efh->tef", x, up)
    everyone = torch.einsum("tef,ehf->teh", inner, down)
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
            return (rows @ weights[layer]).tanh() + i + rank

        return chunk

    chunks = [make(layer) for layer in range(4)]
    x = [randn(8, 6, seed=10 * i + rank) for i in (0, 1)]
    expected = []
    for i in (0, 1):  # one after another, each waiting for its rows
        rows = x[i]
        for chunk in chunks:
            arriving = torch.empty_like(rows)
            dist.all_to_all_single(arriving, chunk(i, rows), group=Here.group)
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


def check_top_k_gradient(form: Any, rank: int, size: int) -> None:
    """Autograd's gradient of top-k, and of gates that are made of it."""
    logits = randn(12, 8, seed=rank).requires_grad_()
    grad = randn(12, 3, seed=9)
    values, experts = logits.sigmoid().topk(3)
    values.backward(grad)
    with Sent() as sent:
        dscores = form(grad, experts, 8)
    scores = logits.detach().sigmoid()
    dlogits = dscores * scores * (1 - scores)
    same("the gradient of sigmoid and top-k", dlogits, gradient(logits))
    zeros = dscores.eq(0).sum(-1)
    same("zero for the five others", zeros, torch.full_like(zeros, 5))

    logits.grad = None
    probabilities = logits.softmax(-1)
    probabilities.gather(1, experts).backward(grad)
    p = probabilities.detach()
    dlogits = p * (dscores - (dscores * p).sum(-1, keepdim=True))
    same("with a softmax all logits get one", dlogits, gradient(logits))
    sends(sent, "nothing", 0)


def check_top_k_router(form: Any, rank: int, size: int) -> None:
    """Choices token by token; gradients are autograd's of gates mostly zero."""
    x = randn(10, 6, seed=rank)
    for score, groups, top_groups in (("softmax", 1, 1), ("sigmoid", 4, 2)):
        router = form(6, 8, 4, score, groups=groups, top_groups=top_groups)
        weight = router.weight.detach().clone().requires_grad_()
        router.balance_bias[5] = 0.2  # into the choice, and not into the gates
        with Sent() as sent:
            experts, gates, probabilities = router(x)
            gates.square().sum().backward()
        logits = x @ weight.T
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        chosen = torch.zeros(10, 8, dtype=torch.bool).scatter(1, experts, True)
        kept = scores * chosen
        whole = kept / kept.sum(-1, keepdim=True)
        whole.square().sum().backward()
        name = f"{score}, {top_groups} of {groups} groups"
        same(f"gates, {name}", gates, whole.gather(1, experts))
        same(f"gradient, {name}", gradient(router.weight), gradient(weight))
        total = probabilities.sum(-1)
        same("all scores of a token sum to 1", total, torch.ones_like(total))
        best = torch.stack(
            [choice(row, groups, top_groups) for row in scores + router.balance_bias]
        )
        same(f"experts, {name}", experts.sort(-1)[0], best.sort(-1)[0])
    sends(sent, "nothing", 0)


def choice(row: torch.Tensor, groups: int, top_groups: int) -> torch.Tensor:
    """Four experts, the best ones of the groups with the largest sum of two."""
    values = row.tolist()
    step = 8 // groups
    parts = [list(range(i, i + step)) for i in range(0, 8, step)]
    parts.sort(key=lambda part: -sum(sorted(values[i] for i in part)[-2:]))
    allowed = [i for part in parts[:top_groups] for i in part]
    return torch.tensor(sorted(allowed, key=lambda i: -values[i])[:4])


def check_update_balance_bias(form: Any, rank: int, size: int) -> None:
    """A bias on a router that prefers two experts makes the loads even."""
    bias = torch.zeros(4)
    with Sent() as sent:
        form(bias, torch.tensor([7, 1, 4, 4]), rate=0.5)
    same("down, up, and as it was", bias, torch.tensor([-0.5, 0.5, 0.0, 0.0]))

    scores = randn(1024, 8, seed=rank).add(torch.tensor([2, 1, 0, 0, 0, 0, 0, 0.0]))
    bias = torch.zeros(8)
    for step in range(400):
        counts = torch.bincount((scores + bias).topk(2)[1].flatten(), minlength=8)
        form(bias, counts, rate=0.1 if step < 100 else 0.01)
    largest = counts.max() / 256
    same(
        "400 steps later, the largest load / the mean", largest, torch.tensor(1.0), 0.1
    )
    sends(sent, "nothing", 0)
