"""Two experts on each of 4 ranks, which have 3, 4, 5 and 0 tokens: one process's."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.expert_parallel.gshard_moe import GShardMoE


def check(rank: int, size: int) -> None:
    shapes = {"gate_proj": (8, 5, 6), "up_proj": (8, 5, 6), "down_proj": (8, 6, 5)}
    whole = {
        name: randn(*shape, seed=i, dtype=torch.float64).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }
    router = randn(8, 6, seed=3, dtype=torch.float64).requires_grad_()
    x = randn(12, 6, seed=4, dtype=torch.float64).requires_grad_()
    grad = randn(12, 6, seed=5, dtype=torch.float64)

    scores = (x @ router.T).softmax(-1)  # every expert for every token, and gates of 0
    experts = scores.topk(2)[1]
    kept = scores * torch.zeros_like(scores).scatter(1, experts, 1)
    gates = kept / kept.sum(-1, keepdim=True)
    inner = F.silu(torch.einsum("th,efh->tef", x, whole["gate_proj"]))
    inner = inner * torch.einsum("th,efh->tef", x, whole["up_proj"])
    y = torch.einsum("te,tef,ehf->th", gates, inner, whole["down_proj"])
    y.backward(grad)

    layer = GShardMoE(
        SimpleNamespace(
            router=SimpleNamespace(weight=router, top_k=2),
            experts=SimpleNamespace(**whole),
        )
    )
    tokens = [3, 4, 5, 0]
    mine = x.detach().split(tokens)[rank].requires_grad_()
    with Sent() as sent:
        out = layer(mine)
        out.backward(grad.split(tokens)[rank])
    same("output", joined(out, tokens, rank), y, 1e-11)
    same("dx", joined(gradient(mine), tokens, rank), gradient(x), 1e-11)
    for name, full in whole.items():
        found, expected = gradient(getattr(layer, name)), gradient(full)
        same(f"d{name} of two experts", found, expected.chunk(size)[rank], 1e-11)
    total = gradient(layer.router)
    dist.all_reduce(total)  # each rank has that of its tokens
    same("the routers' gradients, summed", total, gradient(router), 1e-11)

    to = experts.div(2, rounding_mode="floor").split(tokens)  # the experts' ranks
    leaving = int(to[rank].ne(rank).sum())
    arriving = sum(int(t.eq(rank).sum()) for r, t in enumerate(to) if r != rank)
    formula = "6 counts of 8 bytes; 48 a row: dispatch, combine, and both back"
    sends(sent, formula, 6 * 8 + 48 * (leaving + arriving + arriving + leaving))


def joined(part: torch.Tensor, tokens: list[int], rank: int) -> torch.Tensor:
    """The tokens of all ranks; one of them has none."""
    first, whole = sum(tokens[:rank]), part.new_zeros(sum(tokens), 6)
    whole[first : first + len(part)] = part.detach()
    dist.all_reduce(whole)
    return whole
