"""Copies of a small batch, sorted by expert as the layer sorts them."""

import torch

from xtrain.expert_parallel import TopKRouter
from xtrain.expert_parallel.grouped import LoopRows, PaddedRows
from xtrain.expert_parallel.routing import count_experts, sort_copies

TOKENS, EXPERTS, TOP_K = 8, 4, 2


def sorted_batch() -> dict[str, list]:
    """Choices of a router with random weights, and the order of the copies."""
    torch.manual_seed(5)
    router = TopKRouter(6, EXPERTS, TOP_K)
    with torch.no_grad():
        routing = router(torch.randn(TOKENS, 6) + 0.5)
    order = sort_copies(routing.experts_Tk, routing.kept_Tk, routing.counts_E)
    return {
        "experts": routing.experts_Tk.tolist(),
        "counts": routing.counts_E.tolist(),
        "order": order.tolist(),
    }


def rows_computed(experts: list[int]) -> dict[str, int]:
    """Rows that go into a product, by way, for the expert of each sorted copy."""
    counts_E = count_experts(torch.tensor(experts), EXPERTS)
    packed = {
        "loop": LoopRows(counts_E).pack(torch.ones(len(experts), 1)),
        "padded": PaddedRows(counts_E).pack(torch.ones(len(experts), 1)),
    }
    return {name: rows.flatten(0, -2).shape[0] for name, rows in packed.items()}
