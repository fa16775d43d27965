"""Eight experts over ranks that have 3, 4, 5 and 0 tokens: one process's."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Here, Sent, gradient, randn, same, sends

SIZES = (1, 2, 4, 8)


def check(form: Any, rank: int, size: int) -> None:
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
