"""Functions that run on every rank for the questions and errata of lc7."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xtrain.comm import CommLedger, ring_all_reduce
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import DIRECT, TORCH
from xtrain.comm.work import Work
from xtrain.expert_parallel import (
    GShardMoE,
    MoE,
    Routing,
    TopKRouter,
    dispatch,
    plan_dispatch,
)

EXPERTS, HIDDEN, INNER = 8, 6, 5
TOKENS, TOP_K = 16, 2  # tokens of a rank


def full_layer() -> MoE:
    """The layer of one process, the same on every rank."""
    torch.manual_seed(7)
    return MoE(HIDDEN, INNER, EXPERTS, TOP_K, dtype=torch.float64)


def routing_of(experts_Tk: Tensor, num_experts: int) -> Routing:
    """A routing with these choices, and gates of 1."""
    gates_Tk = torch.ones(experts_Tk.shape, dtype=torch.float64)
    logits_TE = torch.zeros(len(experts_Tk), num_experts, dtype=torch.float64)
    kept_Tk = torch.ones_like(experts_Tk, dtype=torch.bool)
    return Routing(experts_Tk, gates_Tk, logits_TE, logits_TE, kept_Tk)


def own_tokens(requires_grad: bool = False) -> Tensor:
    """This rank's tokens, other ones on each."""
    generator = torch.Generator().manual_seed(rank_and_size(None)[0])
    x_TH = torch.randn(
        TOKENS, HIDDEN, dtype=torch.float64, generator=generator, device="cpu"
    )
    return x_TH.to(torch.get_default_device()).requires_grad_(requires_grad)


# ------------------------------------------------------------ all-to-alls of a layer


def exchanges(shared: bool = False) -> list[dict[str, Any]]:
    """The all-to-alls of a step of a layer: rows to and from each rank, their width.

    The first one carries counts, and has no splits.

    Args:
        shared: of a layer that has a shared expert as well.
    """
    found: list[dict[str, Any]] = []

    def noted(
        output: Tensor,
        given: Tensor,
        came: Any = None,
        sent: Any = None,
        group: Any = None,
    ) -> Work:
        row = given.shape[1:].numel()
        found.append(
            {"sent": sent, "received": came, "row": row, "dtype": str(given.dtype)}
        )
        return TORCH.all_to_all_single(output, given, came, sent, group)

    full = full_layer()
    if shared:
        routed, sizes = full.state_dict(), (HIDDEN, INNER, EXPERTS, TOP_K)
        full = MoE(*sizes, shared_intermediate_size=INNER, dtype=torch.float64)
        full.load_state_dict(routed, strict=False)
    layer = GShardMoE.from_full(
        full, collectives=replace(TORCH, all_to_all_single=noted)
    )
    layer(own_tokens(requires_grad=True)).square().sum().backward()
    return found


def messages_of_both() -> dict[str, list[Any]]:
    """[peer, bytes] of each message: of a dispatch, and of a ring all-reduce."""
    x_TH = own_tokens()
    plan = plan_dispatch(full_layer().router(x_TH), collectives=DIRECT)
    with CommLedger() as exchanged:
        dispatch(x_TH, plan)
    with CommLedger() as reduced:
        ring_all_reduce(x_TH)
    return {
        name: [[e.peer, e.nbytes] for e in ledger.events if e.kind == "send"]
        for name, ledger in (("dispatch", exchanged), ("all-reduce", reduced))
    }


def received_rows() -> int:
    """How many rows the experts of this rank get in one dispatch."""
    return sum(plan_dispatch(full_layer().router(own_tokens())).received)


# ------------------------------------------------------------------ nodes of a token


def nodes_of_tokens(
    experts: int, nodes: int, top_k: int, limit: int, tokens: int
) -> dict[str, int]:
    """How many tokens went to how many nodes; each node has a run of experts."""
    torch.manual_seed(0)
    router = TopKRouter(
        16, experts, top_k, score="sigmoid", groups=nodes, top_groups=limit
    )
    with torch.no_grad():
        chosen_Tk = router(torch.randn(tokens, 16)).experts_Tk
    visited = [len(set(row)) for row in (chosen_Tk // (experts // nodes)).tolist()]
    return {str(count): times for count, times in sorted(Counter(visited).items())}
