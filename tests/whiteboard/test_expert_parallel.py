"""The whiteboard forms of lc7 equal one process that asks every expert for every token.

On groups of 1 to 4 ranks and on parts of the ranks, for top-1 to top-4, ranks without
tokens, experts without copies and one expert with all of them, in float64, fp32 and 16
bits; and they equal the library's where it has the same.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tensor_parallel.dense import random_of, sub_group
from xtrain import expert_parallel as library
from xtrain.copying.forms import forms, header
from xtrain.expert_parallel.capacity import within_capacity
from xtrain.whiteboard.expert_parallel import (
    overlapped_all_to_all as overlapped_file,
)
from xtrain.whiteboard.expert_parallel.combine import combine
from xtrain.whiteboard.expert_parallel.dispatch import dispatch
from xtrain.whiteboard.expert_parallel.expert_capacity import expert_capacity
from xtrain.whiteboard.expert_parallel.gshard_moe import GShardMoE
from xtrain.whiteboard.expert_parallel.load_balancing_loss import (
    load_balancing_loss,
)
from xtrain.whiteboard.expert_parallel.moe_backward import moe_backward
from xtrain.whiteboard.expert_parallel.moe_forward import moe_forward
from xtrain.whiteboard.expert_parallel.overlapped_all_to_all import (
    overlapped_all_to_all,
)
from xtrain.whiteboard.expert_parallel.top_k_gradient import top_k_gradient
from xtrain.whiteboard.expert_parallel.top_k_router import TopKRouter
from xtrain.whiteboard.expert_parallel.update_balance_bias import (
    update_balance_bias,
)

FOLDER = "xtrain.whiteboard.expert_parallel"
ROUTER = f"{FOLDER}.top_k_router:TopKRouter"
GRADIENT = f"{FOLDER}.top_k_gradient:top_k_gradient"
LOSS = f"{FOLDER}.load_balancing_loss:load_balancing_loss"
CAPACITY = f"{FOLDER}.expert_capacity:expert_capacity"
BIAS = f"{FOLDER}.update_balance_bias:update_balance_bias"
FORWARD = f"{FOLDER}.moe_forward:moe_forward"
BACKWARD = f"{FOLDER}.moe_backward:moe_backward"
DISPATCH = f"{FOLDER}.dispatch:dispatch"
COMBINE = f"{FOLDER}.combine:combine"
GSHARD = f"{FOLDER}.gshard_moe:GShardMoE"
OVERLAPPED = f"{FOLDER}.overlapped_all_to_all:overlapped_all_to_all"

GROUPS = [None, [0], [0, 1], [0, 1, 2], [1, 3]]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 0.02,
    torch.bfloat16: 0.08,
}
"""Of the largest value, if above 1; one process has the same inputs in float64."""
H, F_ = 6, 5
E, LOCAL = 12, 12
"""Twelve experts lie evenly on 1, 2, 3 and 4 ranks."""
NAMES = ("gate_proj", "up_proj", "down_proj")


def near(actual: Tensor, expected: Tensor, what: str, dtype=torch.float64) -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype in (dtype, torch.float64, torch.float32), what
    if actual.numel() == 0:
        return
    allowed = TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    error = (actual.detach().double() - expected.double()).abs().max().item()
    assert error <= allowed, f"{what}: {error} > {allowed}"


def weights(dtype=torch.float64, experts: int = E) -> list[Tensor]:
    """The router's weight, and gate, up and down of all experts."""
    shapes = (experts, H), (experts, F_, H), (experts, F_, H), (experts, H, F_)
    return [random_of(20 + i, *shape).div(2).to(dtype) for i, shape in enumerate(shapes)]


def scored(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Experts [T, k] and renormalised gates of a softmax: [T, E], most of them zero."""
    scores = (x @ router.T).softmax(-1)
    experts = scores.topk(top_k)[1]
    kept = scores * torch.zeros_like(scores).scatter(1, experts, 1)
    return experts, kept / kept.sum(-1, keepdim=True)


def every_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What each expert returns for each token: [T, E, H]."""
    inner = F.silu(torch.einsum("th,efh->tef", x, gate))
    inner = inner * torch.einsum("th,efh->tef", x, up)
    return torch.einsum("tef,ehf->teh", inner, down)


def dense(x: Tensor, of_layer: list[Tensor], top_k: int, grad: Tensor) -> list[Tensor]:
    """y, dx and the gradients of the four weights, in float64, by autograd."""
    leaves = [t.detach().double().clone().requires_grad_() for t in (x, *of_layer)]
    _, gates = scored(leaves[0], leaves[1], top_k)
    y = torch.einsum("te,teh->th", gates, every_expert(leaves[0], *leaves[2:]))
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]


# --- on one device --------------------------------------------------------------------


def chosen_by_sorting(row: list[float], top_k: int, groups: int, top: int) -> list[int]:
    """The k best experts of the best groups, of which the best k / top count."""
    step = len(row) // groups
    parts = [list(range(i, i + step)) for i in range(0, len(row), step)]
    judged = max(1, top_k // top)
    parts.sort(key=lambda p: -sum(sorted((row[i] for i in p), reverse=True)[:judged]))
    allowed = [i for part in parts[:top] for i in part]
    return sorted(allowed, key=lambda i: -row[i])[:top_k]


ROUTERS = list(
    itertools.product(
        ("softmax", "sigmoid"), (True, False), ((1, 1), (4, 2), (3, 1)), (1, 2, 4)
    )
)


@pytest.mark.verifies(ROUTER)
def test_a_router_chooses_the_best_and_gates_are_their_scores():
    for score, renormalize, (groups, top_groups), top_k in ROUTERS:
        router = TopKRouter(
            H, E, top_k, score, renormalize, 2.5, groups, top_groups
        ).double()
        twin = library.TopKRouter(
            H, E, top_k, score=score, renormalize=renormalize, scale=2.5,
            groups=groups, top_groups=top_groups, balance_bias=True,
        ).double()  # fmt: skip
        with torch.no_grad():
            for layer in (router, twin):
                layer.weight.copy_(weights()[0])
                layer.balance_bias.copy_(random_of(3, E) / 5)
        for tokens, dtype in ((0, torch.float64), (33, torch.float64),
                              (33, torch.bfloat16)):  # fmt: skip
            x = random_of(tokens, tokens, H, dtype=dtype)
            what = f"{score}, {renormalize}, {groups}, {top_k}, {tokens}, {dtype}"
            experts, gates, probabilities = router(x)
            logits = x.to(gates.dtype) @ router.weight.to(gates.dtype).T
            scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
            biased = (scores + router.balance_bias.to(scores.dtype)).tolist()
            best = [chosen_by_sorting(r, top_k, groups, top_groups) for r in biased]
            assert experts.tolist() == best, what
            kept = scores.gather(1, experts)
            kept = kept / kept.sum(-1, keepdim=True) if renormalize else kept
            near(gates, 2.5 * kept, what)
            near(probabilities, scores / scores.sum(-1, keepdim=True), what)
            if score == "softmax" or dtype == torch.float64:
                routing = twin(x)
                assert torch.equal(experts, routing.experts_Tk), what
                near(gates, routing.gates_Tk, what)
                near(probabilities, routing.probabilities_TE, what)
