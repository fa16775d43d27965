"""A small mixture of experts trained from a seed, with and without balancing.

Inputs are 16 clusters around a common vector, and each cluster has a linear map of its
own that the experts have to learn. Hidden states of real models have such a common
vector, too, and it is what the router sees first: all tokens look alike to it, so the
expert that is slightly ahead gets nearly all of them, and learns for all of them.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from xtrain.expert_parallel import MoE

EXPERTS, HIDDEN, INNER, CLUSTERS = 8, 16, 16, 16
TOKENS, STEPS = 256, 150
RATE, AUXILIARY, BIAS_RATE = 3e-3, 0.3, 0.02
WAYS = ("none", "loss", "bias")
SEED = 1


class Data:
    """Batches of tokens and what the layer shall make of them."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres_CH = self.normal(CLUSTERS, HIDDEN) + self.normal(HIDDEN)
        self.maps_CHH = self.normal(CLUSTERS, HIDDEN, HIDDEN) * HIDDEN**-0.5

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def batch(self, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
        """Inputs and targets, [tokens, HIDDEN]."""
        cluster = torch.randint(CLUSTERS, (tokens,), generator=self.generator)
        x_TH = self.centres_CH[cluster] + 0.5 * self.normal(tokens, HIDDEN)
        return x_TH, torch.einsum("tgh,th->tg", self.maps_CHH[cluster], x_TH)


def new_layer(way: str, top_k: int) -> MoE:
    """The layer with the weights of a seed; softmax gates, kept as they are if k=1."""
    torch.manual_seed(0)
    layer = MoE(
        HIDDEN, INNER, EXPERTS, top_k,
        renormalize=top_k > 1, balance_bias=way == "bias",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for name, weight in layer.named_parameters():
        std = 0.02 if "router" in name else weight.shape[-1] ** -0.5
        weight.data = std * torch.randn(weight.shape, generator=generator)
    return layer


@lru_cache(maxsize=16)
def trained(way: str, top_k: int, seed: int) -> tuple[MoE, dict[str, Any]]:
    """The layer after STEPS steps, and each step's loads and loss without auxiliary."""
    layer, data = new_layer(way, top_k), Data(seed)
    optimizer = torch.optim.Adam(layer.parameters(), lr=RATE)
    told: dict[str, Any] = {"loads": [], "losses": []}
    for _ in range(STEPS):
        x_TH, target_TH = data.batch()
        loss = (layer(x_TH) - target_TH).pow(2).mean()
        stats = layer.router.stats
        told["loads"].append(stats.counts_E.tolist())
        told["losses"].append(loss.item())
        if way == "loss":
            loss = loss + AUXILIARY * stats.load_balancing_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if way == "bias":
            layer.router.update_balance_bias(stats.counts_E, BIAS_RATE)
    return layer, told


def training(way: str, top_k: int, seed: int = SEED) -> dict[str, Any]:
    """What `trained` tells of one way: "none", "loss" or "bias"."""
    return trained(way, top_k, seed)[1]


def routing_map(way: str, top_k: int, tokens: int) -> list[list[float]]:
    """Gates of the trained layer for a new batch, [tokens][experts]; 0: not chosen."""
    layer, _ = trained(way, top_k, SEED)
    x_TH, _ = Data(SEED).batch(tokens)
    with torch.no_grad():
        routing = layer.router(x_TH)
    gates_TE = torch.zeros(tokens, EXPERTS)
    gates_TE.scatter_(1, routing.experts_Tk, routing.gates_Tk.float())
    return gates_TE.tolist()


def dropped_copies(way: str, top_k: int, factors: list[float]) -> list[int]:
    """Copies without a slot, of a new batch and for each capacity factor."""
    from xtrain.expert_parallel.capacity import within_capacity
    from xtrain.plan.experts import expert_capacity

    layer, _ = trained(way, top_k, SEED)
    x_TH, _ = Data(SEED).batch()
    with torch.no_grad():
        experts_Tk = layer.router(x_TH).experts_Tk
    found = []
    for factor in factors:
        slots = expert_capacity(TOKENS, EXPERTS, top_k, factor)
        kept_Tk = within_capacity(experts_Tk, EXPERTS, slots)
        found.append(int((~kept_Tk).sum()))
    return found
