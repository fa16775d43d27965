"""Balance: a small mixture of experts trained in three ways, and who gets its tokens.

Inputs are 16 clusters around a common vector, and each cluster has a linear map of its
own that the experts have to learn. Hidden states of real models have such a common
vector, too, and it is what the router sees first: all tokens look alike to it, so the
expert that is slightly ahead gets nearly all of them, and learns for all of them.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from xtrain.expert_parallel import MoE

from ... import runs
from ...figures import REGISTRY
from ...svg import document, rect, text
from ...values import value

EXPERTS, HIDDEN, INNER, CLUSTERS = 8, 16, 16, 16
TOKENS, STEPS = 256, 150
RATE, AUXILIARY, BIAS_RATE = 3e-3, 0.3, 0.02
WAYS = {"none": "no balancing", "loss": "auxiliary loss", "bias": "balance bias"}
SEED = 1
WIDTH, LEFT = 400, 66.0


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


def gates_of_batch(way: str, top_k: int, tokens: int) -> list[list[float]]:
    """Gates of the trained layer for a new batch, [tokens][experts]; 0: not chosen."""
    layer, _ = trained(way, top_k, SEED)
    x_TH, _ = Data(SEED).batch(tokens)
    with torch.no_grad():
        routing = layer.router(x_TH)
    gates_TE = torch.zeros(tokens, EXPERTS)
    gates_TE.scatter_(1, routing.experts_Tk, routing.gates_Tk.float())
    return gates_TE.tolist()


def told(way: str, top_k: int = 1, seed: int = SEED) -> dict[str, Any]:
    """Loads and losses of the run."""
    return runs.remembered(training, 1, way, top_k, seed)[0]


@value
def busiest_at(step: int, way: str) -> float:
    """Load of the busiest expert over the mean, with top 1."""
    return max(told(way)["loads"][step]) * EXPERTS / TOKENS


@value
def busiest_over_mean(way: str, top_k: int = 1, seed: int = SEED) -> float:
    """The same, averaged over the last ten steps."""
    last = told(way, top_k, seed)["loads"][-10:]
    return sum(max(loads) * EXPERTS / sum(loads) for loads in last) / 10


@value
def late_loss(way: str, seed: int = SEED) -> float:
    """The model's loss with top 1, averaged over the last ten steps."""
    return sum(told(way, 1, seed)["losses"][-10:]) / 10


@value
def dropped_share(way: str, slots: int) -> float:
    """Of the last batch: tokens that find no slot, with top 1."""
    return sum(max(0, load - slots) for load in told(way)["loads"][-1]) / TOKENS


@REGISTRY
def expert_loads(every: int = 8) -> str:
    """Share of each expert by step: a row of cells, for each way to balance."""
    found = {way: told(way)["loads"][::every] for way in WAYS}
    return bands(
        "Share of each expert by step", found,
        lambda load: min(1.0, 0.06 + 0.94 * load * EXPERTS / TOKENS / 3),
        lambda column, load: f"step {column * every}: {load / TOKENS:.0%}",
        lambda loads: loads[-1],
    )  # fmt: skip


@REGISTRY
def routing_map(ways: str = "bias", tokens: int = 26) -> str:
    """Which experts the tokens of a batch go to, with which gates: trained, top 2.

    Args:
        ways: one of the runs, or several joined by "+".
    """
    found = {
        way: runs.remembered(gates_of_batch, 1, way, 2, tokens)[0]
        for way in ways.split("+")
    }
    return bands(
        f"{tokens} tokens and the experts they go to", found,
        lambda gate: 0.3 + 0.7 * gate if gate else 0.06,
        lambda token, gate: f"token {token}: gate {gate:.2f}",
        lambda gates: sum(gate > 0 for gate in gates),
    )  # fmt: skip


def bands(
    title: str,
    found: dict[str, list[list[Any]]],
    shade: Callable[[Any], float],
    said: Callable[[int, Any], str],
    load: Callable[[tuple], int],
) -> str:
    """For each way a row of cells for each expert, from [columns][experts]."""
    parts, words, y = [], [], 4.0
    for way, columns in found.items():
        wide = (WIDTH - LEFT - 34) / len(columns)
        parts.append(text(4, y + 12, WAYS[way], "xt-label"))
        parts.append(text(WIDTH - 4, y + 12, "load", "xt-tick", "end"))
        y += 18
        loads = []
        for expert, row in enumerate(zip(*columns, strict=True)):
            parts.append(text(LEFT - 8, y + 10, f"expert {expert}", "xt-tick", "end"))
            for column, cell in enumerate(row):
                hover = f"expert {expert}, {said(column, cell)}"
                parts.append(
                    rect(LEFT + wide * column, y, wide - 1.3, 12,
                         expert if cell else 7, opacity=shade(cell), hover=hover)
                )  # fmt: skip
            loads.append(load(row))
            parts.append(text(WIDTH - 4, y + 10, str(loads[-1]), "xt-tick", "end"))
            y += 14
        y += 10
        words.append(f"{WAYS[way]}: loads {loads}")
    return document(WIDTH, y, parts, title, "; ".join(words))
