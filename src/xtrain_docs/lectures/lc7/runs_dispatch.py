"""Runs of dispatch and combine: what messages carried, bytes, groups, gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import DIRECT
from xtrain.expert_parallel import (
    GShardMoE,
    MoE,
    Routing,
    combine,
    dispatch,
    plan_dispatch,
)

# The experts of eight tokens, two on each of four ranks; rank r has expert r.
CHOICES = ((1, 2), (0, 2), (2, 3), (0, 1), (2, 0), (1, 2), (3, 2), (1, 0))
EXPERTS, HIDDEN, INNER = 8, 6, 5
TOKENS, TOP_K, ITEMSIZE = 16, 2, 8  # tokens of a rank; float64


def routing_of(experts_Tk: Tensor, num_experts: int) -> Routing:
    """A routing with these choices, and gates of 1."""
    gates_Tk = torch.ones(experts_Tk.shape, dtype=torch.float64)
    logits_TE = torch.zeros(len(experts_Tk), num_experts, dtype=torch.float64)
    kept_Tk = torch.ones_like(experts_Tk, dtype=torch.bool)
    return Routing(experts_Tk, gates_Tk, logits_TE, logits_TE, kept_Tk)


def messages() -> dict[str, Any]:
    """To whom this rank sent which tokens, in each of the four all-to-alls.

    Token t is the number t + 1, experts return what they get, and the gradient of
    token t's output is t + 1 as well: so every message tells whose rows it carries.
    """
    rank, _ = rank_and_size(None)
    tokens = slice(2 * rank, 2 * rank + 2)
    routing = routing_of(torch.tensor(CHOICES[tokens]), 4)
    x_TH = 1.0 + torch.arange(8, dtype=torch.float64)[tokens, None]
    plan = plan_dispatch(routing, collectives=DIRECT)
    found: dict[str, Any] = {}
    with CommLedger(values=True) as ledger:
        rows_NH = dispatch(x_TH.requires_grad_(), plan)
    found["dispatch"] = carried(ledger)
    found["rows"] = [round(value) - 1 for value in rows_NH.flatten().tolist()]
    with CommLedger(values=True) as ledger:
        out_TH = combine(rows_NH, routing.gates_Tk, plan)
    found["combine"] = carried(ledger)
    with CommLedger(values=True) as ledger:
        (grad_NH,) = torch.autograd.grad(out_TH, rows_NH, x_TH.detach())
    found["combine, backward"] = carried(ledger)
    with CommLedger(values=True) as ledger:
        torch.autograd.grad(rows_NH, x_TH, grad_NH)
    found["dispatch, backward"] = carried(ledger)
    found["output"] = out_TH.flatten().tolist()
    return found


def carried(ledger: CommLedger) -> dict[str, list[int]]:
    """Tokens by the rank to which this rank sent them; empty messages left out."""
    return {
        str(event.peer): [round(value) - 1 for value in event.values]
        for event in ledger.events
        if event.kind == "send" and event.values
    }


def bytes_of_layer(uniform: bool) -> dict[str, Any]:
    """Bytes that this rank sends for one layer, and its copies for each rank."""
    rank, size = rank_and_size(None)
    torch.manual_seed(rank)
    x_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    layer = GShardMoE.from_full(full_layer(), collectives=DIRECT)
    routing = layer.router(x_TH)
    if uniform:
        copy = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K)
        routing = routing_of(copy % EXPERTS, EXPERTS)
    ranks = routing.experts_Tk.flatten() // (EXPERTS // size)
    found: dict[str, Any] = {"copies": torch.bincount(ranks, minlength=size).tolist()}
    with CommLedger() as ledger:
        plan = plan_dispatch(routing, collectives=DIRECT)
    found["counts"] = ledger.bytes_sent
    with CommLedger() as ledger:
        rows_NH = dispatch(x_TH, plan)
    found["dispatch"] = ledger.bytes_sent
    outputs_NH = layer.experts(rows_NH, plan.counts_L)
    with CommLedger() as ledger:
        out_TH = combine(outputs_NH, routing.gates_Tk, plan)
    found["combine"] = ledger.bytes_sent
    with CommLedger() as ledger:
        (grad_NH,) = torch.autograd.grad(out_TH.sum(), outputs_NH, retain_graph=True)
    found["combine, backward"] = ledger.bytes_sent
    (grad_NH,) = torch.autograd.grad(outputs_NH, rows_NH, grad_NH)
    with CommLedger() as ledger:
        torch.autograd.grad(rows_NH, x_TH, grad_NH)
    found["dispatch, backward"] = ledger.bytes_sent
    return found


def full_layer() -> MoE:
    """The layer of one process, the same on every rank."""
    torch.manual_seed(7)
    return MoE(HIDDEN, INNER, EXPERTS, TOP_K, dtype=torch.float64)


def gradient_errors() -> dict[str, float]:
    """How far gradients of expert ranks are from one process, over their size."""
    rank, size = rank_and_size(None)
    generator = torch.Generator().manual_seed(3)
    every = torch.randn(size, TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    full = full_layer()
    full(every).square().sum().backward()
    layer = GShardMoE.from_full(full)
    layer(every[rank]).square().sum().backward()
    local = EXPERTS // size
    mine = slice(rank * local, (rank + 1) * local)

    def error(name: str, factor: float = 1.0, summed: bool = False) -> float:
        grad = layer.get_parameter(name).grad * factor
        right = full.get_parameter(name).grad
        if name.startswith("experts"):
            right = right[mine]
        if summed:
            dist.all_reduce(grad)
        return float((grad - right).abs().max() / right.abs().max())

    experts, router = "experts.down_proj", "router.weight"
    return {
        "experts": error(experts),
        "experts, averaged": error(experts, 1 / size),
        "router": error(router),
        "router, summed": error(router, summed=True),
    }


def groups(replicas: int) -> dict[str, Any]:
    """This rank's place on a mesh of both axes, its experts, and who sums with it."""
    rank, size = rank_and_size(None)
    mesh = init_mesh((replicas, size // replicas), ("expert_data", "expert"))
    data, expert = mesh["expert_data"], mesh["expert"]
    layer = GShardMoE(HIDDEN, INNER, EXPERTS, TOP_K, group=expert.get_group())
    first = expert.get_local_rank() * layer.experts.num_experts
    return {
        "place": [data.get_local_rank(), expert.get_local_rank()],
        "experts": list(range(first, first + layer.experts.num_experts)),
        "expert_data": dist.get_process_group_ranks(data.get_group()),
        "expert": dist.get_process_group_ranks(expert.get_group()),
        "rank": rank,
    }
